"""The check of shared prompts passes what is right and refuses every mistake that a model could make of them."""

from dataclasses import replace

import pytest
import torch

from fastrl_fast.model import ROUNDING, Policy
from fastrl_fast.packing import Sequence, pack
from fastrl_fast.sharing_check import SharingCheck, alone
from fastrl_fast.types import PackedBatch


def batches() -> list[PackedBatch]:
    """A row without a shared prompt, then one with three groups and a whole sequence."""
    make = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(89, (n,), generator=make).tolist()

    alone = Sequence(ids(5), ids(4), [0.0] * 4, 1.0, 1.0)
    groups = []
    for number, (prompt, completions) in enumerate([(7, [3, 6, 2]), (11, [5, 5]), (4, [9, 1])]):
        asked = ids(prompt)
        groups += [Sequence(asked, ids(n), [0.0] * n, 1.0, 1.0, number) for n in completions]
    return [pack([alone]), pack([*groups[:3], alone, *groups[3:]]), pack([])]


def test_whole_sequences_are_those_of_the_first_and_last_group():
    def rollouts(prompt: list[int], completions: list[list[int]], group: int | None) -> list[Sequence]:
        return [Sequence(prompt, ids, [0.0] * len(ids), 1.0, 1.0, group) for ids in completions]

    batch = pack(
        [
            *rollouts([11, 12], [[21, 22], [23], [24]], 7),
            *rollouts([13], [[25], [26]], 8),
            *rollouts([14], [[27, 28]], None),
            *rollouts([15], [[29], [30, 31]], 9),
        ]
    )
    whole, places = alone(batch)
    assert whole.input_ids.tolist() == [11, 12, 21, 22, 11, 12, 24, 15, 29, 15, 30, 31]
    assert whole.prefixes.shape == (0, 3) and places.tolist() == [0, 1, 3, 8, 9, 10]
    assert torch.equal(whole.targets, batch.targets[places])
    whole, places = alone(pack(rollouts([11, 12], [[21, 22], [23]], 7)))
    assert whole.input_ids.tolist() == [11, 12, 21, 22, 11, 12, 23] and places.tolist() == [0, 1, 2]


class Mistaken:
    """A policy that reads rows with shared prompts wrongly, and counts its forward passes."""

    def __init__(self, policy: Policy, mistake) -> None:
        self.policy, self.mistake, self.passes = policy, mistake, 0
        self.parameters = policy.parameters

    def __call__(self, batch: PackedBatch):
        self.passes += 1
        return self.policy(self.mistake(batch) if batch.prefixes.shape[0] else batch)


def without_prompts(batch):
    return replace(batch, prefixes=batch.prefixes[:0])


def positions_from_zero(batch):
    borders = batch.cu_seqlens
    starts = borders[:-1].repeat_interleave(borders.diff())
    return replace(batch, position_ids=torch.arange(len(batch.input_ids)) - starts)


def positions_that_go_on(batch):
    return replace(batch, position_ids=torch.arange(len(batch.input_ids)))


def completions_see_each_other(batch):
    """The first group as one causal piece."""
    _, middle, end = batch.prefixes[0].tolist()
    borders = [b for b in batch.cu_seqlens.tolist() if not middle < b < end]
    return replace(batch, cu_seqlens=torch.tensor(borders))


def first_targets_from_the_row_before_them(batch):
    """What a shift of the whole row would read: the last row of the completion before."""
    rows = batch.row_index.clone()
    first = batch.cu_targets[2]
    rows[first] = rows[first + 1] - 1
    return replace(batch, row_index=rows)


def last_group_on_the_first_prompt(batch):
    """Only the last group is wrong."""
    prefixes = batch.prefixes.clone()
    ids = batch.input_ids.clone()
    ids[prefixes[-1, 0] : prefixes[-1, 1]] = ids[: prefixes[-1, 1] - prefixes[-1, 0]]
    return replace(batch, input_ids=ids)


MISTAKES = [
    without_prompts,
    positions_from_zero,
    positions_that_go_on,
    completions_see_each_other,
    first_targets_from_the_row_before_them,
    last_group_on_the_first_prompt,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_refused(make_lm, process_group, mistake):
    policy = Mistaken(Policy(make_lm(dtype=torch.float32), temperature=1.0), mistake)
    with pytest.raises(ValueError, match=r"^updates\.share_prompts must be false for this model: .*float32"):
        SharingCheck("float32").run(policy, batches())


def test_not_a_number_is_refused(make_lm, process_group):
    lm = make_lm(dtype=torch.float32)
    policy = Mistaken(Policy(lm, temperature=1.0), lambda batch: batch)
    policy.policy.forward = lambda batch: (torch.full(batch.targets.shape, torch.nan), None)
    with pytest.raises(ValueError, match="share_prompts"):
        SharingCheck("float32").run(policy, batches())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_what_is_right_passes_after_two_forward_passes_once(make_lm, process_group, family, dtype):
    policy = Mistaken(Policy(make_lm(family, dtype=getattr(torch, dtype)), temperature=1.0), lambda batch: batch)
    check = SharingCheck(dtype)
    check.run(policy, [batches()[0], batches()[2]])
    assert policy.passes == 0 and not check.done, "nothing is shared yet"
    check.run(policy, batches())
    check.run(policy, batches())
    assert policy.passes == 2 and check.done
    assert set(ROUNDING) == {"float64", "float32", "float16", "bfloat16"}
