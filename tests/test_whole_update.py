"""From rewards to the update: advantages, pruning, packing and loss of random steps against a loop over all rollouts.

`FASTRL_EXAMPLES=20000 python -m pytest tests/test_whole_update.py` looks for longer.
"""

import itertools
import math
import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrl_fast.advantage import assign_advantages
from fastrl_fast.config import LossConfig, PruneConfig
from fastrl_fast.loss import OBJECTIVES, Objective, build_objective, loss_terms
from fastrl_fast.method_config import AdvantageConfig
from fastrl_fast.microbatches import plan_microbatches
from fastrl_fast.ops import policy_loss
from fastrl_fast.packing import Divisor, ModelShape, divisor, pack, split_minibatches, to_train_group
from fastrl_fast.prune import FREE, METHODS, UNGRADED, cut_step, prune, sizes
from fastrl_fast.rewards import total
from fastrl_fast.types import Group, PackedBatch, Prompt, Rollout

EXAMPLES = int(os.environ.get("FASTRL_EXAMPLES", "60"))
SHAPE = ModelShape(parameters=1000, layers=2, hidden=16)
MAX_TOKENS = 10
PRESETS = ("trl", "verl", "fastrl", "rloo", "dr_grpo")
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


# --- a model that is a formula, of the position, the token there and the token to come -----------------------------


def logprob(which: int, position: int, token: int, target: int) -> float:
    """Of the policy (0), the policy before the update (1), the reference (2) and the sampler (3)."""
    seed = (position * 31 + token * 17 + target * 7 + which * 13) % 23
    return -0.2 - 0.05 * ((position + 3 * token + 5 * target) % 11) - (0.02 * seed if which else 0.0)


def of_batch(which: int, batch: PackedBatch) -> torch.Tensor:
    """The same formula, read off the packed rows."""
    rows, targets = batch.row_index.tolist(), batch.targets.tolist()
    positions, tokens = batch.position_ids.tolist(), batch.input_ids.tolist()
    values = [logprob(which, positions[r], tokens[r], t) for r, t in zip(rows, targets, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


# --- random steps ---------------------------------------------------------------------------------------------------

usual = st.sampled_from([0.0, 0.5, 1.0, 1.5, 0.1 + 0.2, 0.3, None, math.nan])
odd = st.one_of(usual, st.floats(-1e6, 1e6), st.sampled_from([1e6, 1e6 + 0.25, -1e-30, 1e-12]))


@dataclass
class Term:
    name: str
    weight: float


@st.composite
def steps(draw: st.DrawFn) -> list[Group]:
    """Groups of any size, also none: some dead, some not graded at all, with twins and empty completions."""
    groups = []
    rewards = draw(st.sampled_from([usual, odd]))
    for number in range(draw(st.integers(0, 5))):
        prompt = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        made = []
        for _ in range(draw(st.integers(1, 6))):
            ids = draw(st.lists(st.integers(0, 3), max_size=6))
            value = total([Term("a", 1.0), Term("b", 0.5)], {"a": draw(rewards), "b": 0.0})
            behind = prompt + ids
            sampled = [logprob(3, i - 1, behind[i - 1], behind[i]) for i in range(len(prompt), len(behind))]
            made.append(Rollout(ids, sampled, "stop", reward=value, right=value >= 1))
        weight = draw(st.sampled_from([1.0, 1.0, 2.5, 0.0]))
        groups.append(Group(Prompt(f"p{number % 3}", prompt, "text", {}), made, number=number, weight=weight))
    return groups


@st.composite
def prunings(draw: st.DrawFn) -> PruneConfig:
    """Every method, with every way to weigh what it keeps."""
    while True:
        try:
            return PruneConfig(
                method=draw(st.sampled_from(sorted(METHODS))),  # type: ignore[arg-type]
                similarity=draw(st.sampled_from(["jaccard", "gradient"])),
                tau=draw(st.sampled_from([0.0, 0.39, 0.8, 1.0])),
                keep_fraction=draw(st.sampled_from([0.1, 0.5, 1.0])),
                weighting=draw(st.sampled_from(["none", "multiplicity", "match"])),
                divisor=draw(st.sampled_from(["kept", "all"])),
                zero_advantage=draw(st.sampled_from(["drop", "keep"])),
            )
        except ValueError:  # not every method can be weighed in every way
            continue


@st.composite
def objectives(draw: st.DrawFn) -> Objective:
    kind = draw(st.sampled_from(sorted(OBJECTIVES)))
    return build_objective(
        LossConfig(
            kind=kind,
            aggregation=draw(st.sampled_from([None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])),
            dual_clip=draw(st.sampled_from([None, 1.1])),
            kl_coef=draw(st.sampled_from([0.0, 0.3])),
            kl_kind=draw(st.sampled_from(["k1", "k2", "k3"])),
        )
    )


# --- the truth ------------------------------------------------------------------------------------------------------


def advantage_by_hand(group: Group, preset: str) -> tuple[list[float], float]:
    """Formulas of the presets over the graded rollouts of a group, 0 for the others and where all are equal; and how
    far rounding the mean of such rewards in float64 may move them."""
    graded = [r.reward for r in group.rollouts if r.completion_ids and not math.isnan(r.reward)]
    n = len(graded)
    if n < 2 or max(graded) == min(graded):
        return [0.0] * len(group.rollouts), 0.0
    mean = math.fsum(graded) / n
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in graded) / (n - 1))
    scale = {"trl": deviation + 1e-4, "verl": deviation + 1e-6, "fastrl": deviation + 1e-6, "dr_grpo": 1.0}
    by_hand, moved = [], n * max(map(abs, graded)) * 2**-52 / scale.get(preset, 1.0)
    for rollout in group.rollouts:
        known = rollout.completion_ids and not math.isnan(rollout.reward)
        spread = (rollout.reward - mean) * n / (n - 1) if preset == "rloo" else rollout.reward - mean
        by_hand.append(spread / scale.get(preset, 1.0) if known else 0.0)
    return by_hand, moved


def loss_by_hand(rollout: Rollout, prompt: list[int], objective: Objective, divisor: Divisor, *, first: bool) -> float:
    """A rollout's part of the loss."""
    behind = prompt + rollout.completion_ids
    places = [(i - 1, behind[i - 1], behind[i]) for i in range(len(prompt), len(behind))]
    new = [logprob(0, *place) for place in places]
    old = [logprob(0, *place) for place in places] if first else [logprob(1, *place) for place in places]
    mean = sum(a - b for a, b in zip(new, old, strict=True)) / max(1, len(new))
    value = 0.0
    for place, now, then in zip(places, new, old, strict=True):
        ratio = math.exp(now - then if objective.ratio == "token" else mean)
        advantage = rollout.advantage
        clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
        if objective.clip == "cispo":
            token = -clipped * advantage * now
        else:
            token = -min(ratio * advantage, clipped * advantage)
            if objective.dual_clip is not None and advantage < 0:
                token = min(token, -objective.dual_clip * advantage)
        gap = now - logprob(2, *place)
        kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[objective.kl_kind]
        value += token + objective.kl_coef * kl
    length = {"token-mean": divisor.loss_tokens, "seq-mean-token-mean": len(new) * divisor.loss_sequences}
    return rollout.weight * value / length.get(objective.aggregation, MAX_TOKENS * divisor.loss_sequences)


def divisor_by_hand(groups: list[Group], which: str) -> Divisor:
    tokens = sequences = 0.0
    for group in groups:
        for rollout in group.rollouts:
            if which == "all":
                weight = group.weight if rollout.drop_reason != UNGRADED else 0.0
            else:
                weight = rollout.weight if rollout.drop_reason in ("", FREE) else 0.0
            tokens += weight * len(rollout.completion_ids)
            sequences += weight
    return Divisor(tokens, sequences)


# --- what is tested ---------------------------------------------------------------------------------------------------


def prepared(groups: list[Group], pruning: PruneConfig, advantage: AdvantageConfig, *, kl: bool) -> list[Group]:
    assign_advantages(groups, preset=advantage.preset)
    prune(groups, pruning, advantage, kl=kl, seed=1, step=2)
    if pruning.method == "cppo_batch":
        cut_step(groups, sizes(groups), keep_fraction=pruning.keep_fraction)
    return groups


def update(
    groups: list[Group], which: str, objective: Objective, *, ranks: int, room: int, shared: float, first: bool
) -> tuple[float, float, Divisor]:
    """Loss and its slope in a factor of all logprobs, summed over the micro-batches of all ranks, as the trainer does
    it."""
    trained = [to_train_group(group, divisor=which, longest_shared=shared) for group in groups]  # type: ignore[arg-type]
    over = divisor(trained)
    sequences = [sequence for group in trained for sequence in group.sequences]
    plans = plan_microbatches(sequences, ranks=ranks, tokens_per_microbatch=room, shape=SHAPE)
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(sequences)))
    assert len({len(plan) for plan in plans}) == 1, "all ranks run as many passes"
    loss = slope = 0.0
    for members in itertools.chain.from_iterable(plans):
        batch = pack([sequences[i] for i in members])
        batch = replace(
            batch,
            advantages=torch.tensor([sequences[i].advantage for i in members] or [0.0], dtype=torch.float64),
            weights=torch.tensor([sequences[i].weight for i in members] or [0.0], dtype=torch.float64),
            rollout_logprobs=of_batch(3, batch),
            old_logprobs=None if first else of_batch(1, batch),
            ref_logprobs=of_batch(2, batch),
        )
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        terms = loss_terms(batch, objective, divisor=over, max_completion_tokens=MAX_TOKENS)
        value, _ = policy_loss(factor * of_batch(0, batch), **terms)
        (gradient,) = torch.autograd.grad(value, factor)
        loss, slope = loss + float(value.detach()), slope + float(gradient)
    return loss, slope, over


@many
@given(groups=steps(), preset=st.sampled_from(PRESETS))
def test_advantages_are_the_formulas_of_each_group(groups: list[Group], preset: str) -> None:
    truth = [advantage_by_hand(group, preset) for group in groups]
    assign_advantages(groups, preset=preset)  # type: ignore[arg-type]
    for group, expected in zip(groups, truth, strict=True):
        found, (values, moved) = [rollout.advantage for rollout in group.rollouts], expected
        assert found == pytest.approx(values, rel=2**-23, abs=2 * moved + 2**-149), "float32 of the float64 truth"
        assert all(map(math.isfinite, found))
        for rollout in group.rollouts:
            assert (rollout.drop_reason == UNGRADED) == (not rollout.completion_ids or math.isnan(rollout.reward))


@many
@given(
    groups=steps(),
    pruning=prunings(),
    objective=objectives(),
    preset=st.sampled_from(PRESETS),
    ranks=st.integers(1, 5),
    room=st.integers(1, 60),
    shared=st.sampled_from([0, 5, math.inf]),
    first=st.booleans(),
)
def test_the_update_is_the_loop_over_all_rollouts(
    groups, pruning, objective, preset, ranks, room, shared, first
) -> None:
    groups = prepared(groups, pruning, AdvantageConfig(preset=preset), kl=objective.kl_coef > 0)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert math.isfinite(rollout.advantage) and math.isfinite(rollout.weight) and rollout.weight >= 0
        assert rollout.graded or rollout.drop_reason == UNGRADED
    over = divisor_by_hand(groups, pruning.divisor)
    loss, slope, ours = update(groups, pruning.divisor, objective, ranks=ranks, room=room, shared=shared, first=first)
    assert (ours.loss_tokens, ours.loss_sequences) == pytest.approx((over.loss_tokens, over.loss_sequences), rel=1e-12)
    counts = [(r, g.prompt.token_ids) for g in groups for r in g.rollouts if r.kept and r.weight]
    if over.loss_tokens == 0:
        assert loss == slope == 0.0 and not counts
        return
    parts = [loss_by_hand(r, ids, objective, over, first=first) for r, ids in counts]
    size = sum(map(abs, parts))
    assert loss == pytest.approx(math.fsum(parts), abs=1e-9 * (size + 1e-3))


@many
@given(
    groups=steps(),
    pruning=prunings(),
    objective=objectives(),
    splits=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60), st.sampled_from([0, 5, math.inf])), min_size=2),
    first=st.booleans(),
)
def test_loss_and_gradient_are_the_same_under_any_split(groups, pruning, objective, splits, first) -> None:
    groups = prepared(groups, pruning, AdvantageConfig(), kl=objective.kl_coef > 0)
    results = [
        update(groups, pruning.divisor, objective, ranks=ranks, room=room, shared=shared, first=first)
        for ranks, room, shared in [(1, 10**6, 0), *splits]
    ]
    for loss, slope, over in results[1:]:
        assert math.isfinite(loss) and math.isfinite(slope) and over == results[0][2]
        assert (loss, slope) == pytest.approx(results[0][:2], rel=1e-9, abs=1e-9)


@many
@given(groups=steps(), parts=st.integers(1, 7), method=st.sampled_from(["none", "mdap", "random"]))
def test_minibatches_hold_each_rollout_once(groups, parts, method) -> None:
    groups = prepared(groups, PruneConfig(method=method), AdvantageConfig(), kl=False)
    trained = [to_train_group(group) for group in groups]
    cut = split_minibatches(trained, parts)
    assert [group for part in cut for group in part] == trained and len(cut) == parts
    whole, sums = divisor(trained), [divisor(part) for part in cut]
    assert sum(d.loss_tokens for d in sums) == pytest.approx(whole.loss_tokens, rel=1e-12)


@many
@given(groups=steps(), preset=st.sampled_from(PRESETS), objective=objectives())
def test_what_is_left_out_for_free_changes_nothing(groups, preset, objective) -> None:
    """Rollouts of advantage 0 without a KL term: dropped before the update or run through it."""
    objective = replace(objective, kl_coef=0.0)
    results = []
    for rule in ("drop", "keep"):
        copies = [replace(g, rollouts=[replace(r) for r in g.rollouts]) for g in groups]
        settings_ = PruneConfig(method="none", zero_advantage=rule)  # type: ignore[arg-type]
        made = prepared(copies, settings_, AdvantageConfig(preset=preset), kl=False)
        results.append(update(made, "kept", objective, ranks=2, room=20, shared=math.inf, first=False))
    assert results[0][:2] == pytest.approx(results[1][:2], rel=1e-9, abs=1e-9)
    assert results[0][2] == results[1][2]
