"""The plan of micro-batches: every sequence once, as many on every rank, balanced, a shared prompt counted once."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastrl_fast.microbatches import plan_microbatches
from fastrl_fast.packing import ModelShape, Sequence, microbatch_flops, pack

SHAPE = ModelShape(parameters=1000, layers=2, hidden=16)


def plan(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    sequences = [Sequence([1], [2] * (n - 1), [0.0] * (n - 1), 1.0, 1.0) for n in lengths]
    return plan_microbatches(sequences, ranks=ranks, tokens_per_microbatch=budget, shape=SHAPE)


@given(st.lists(st.integers(2, 120), max_size=60), st.integers(1, 8), st.integers(1, 150))
@example([95] * 5 + [20] * 5, 2, 100)  # P10: token totals per rank would give 5 and 1 micro-batches.
@example([10, 10], 4, 100)  # P05, P08: fewer rows than ranks.
@example([], 3, 100)  # P02: nothing survived.
@settings(max_examples=150, deadline=None)
def test_plan_properties(lengths, ranks, budget):
    """P05, P08, P10, P11."""
    plans = plan(lengths, ranks, budget)
    assert len(plans) == ranks
    flat = [i for rank in plans for batch in rank for i in batch]
    assert sorted(flat) == list(range(len(lengths))), "every sequence exactly once"
    assert len({len(rank) for rank in plans}) == 1, "all ranks run as many micro-batches"
    for batch in (b for rank in plans for b in rank):
        tokens = sum(lengths[i] for i in batch)
        assert tokens <= budget or len(batch) == 1, "only a long sequence of its own may exceed the budget"
    cost = [SHAPE.forward_flops(n) for n in lengths]
    loads = [sum(cost[i] for b in rank for i in b) for rank in plans]
    assert max(loads) <= sum(cost) / ranks + max(cost, default=0.0) + 1e-6
    assert plans == plan(lengths, ranks, budget), "a pure function of its arguments"
    longest = max(sum(bool(b) for b in rank) for rank in plans)
    assert all(len(rank) == longest for rank in plans), "no micro-batch that is empty on every rank"


def grouped(groups: list[tuple[int, list[int]]]) -> list[Sequence]:
    """Rollouts of groups with prompts and completions of these lengths; a prompt is its group's number."""
    return [
        Sequence([number] * prompt, [100 + at] * length, [0.0] * length, 1.0, 1.0, number)
        for number, (prompt, lengths) in enumerate(groups)
        for at, length in enumerate(lengths)
    ]


def tokens_of(members: list[Sequence]) -> int:
    return sum(len(s.completion_ids) for s in members) + sum(
        {s.group: len(s.prompt_ids) for s in members if s.group is not None}.values()
    )


def loads(sequences: list[Sequence], plans: list[list[list[int]]]) -> list[float]:
    return [sum(microbatch_flops([sequences[i] for i in batch], SHAPE) for batch in rank) for rank in plans]


shapes = st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=9))


@given(st.lists(shapes, max_size=12), st.integers(1, 6), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_plan_of_groups(groups, ranks, budget):
    sequences = grouped(groups)
    settings = dict(ranks=ranks, tokens_per_microbatch=budget, shape=SHAPE)
    plans = plan_microbatches(sequences, **settings)
    flat = [i for rank in plans for batch in rank for i in batch]
    assert sorted(flat) == list(range(len(sequences))), "every sequence exactly once"
    assert len({len(rank) for rank in plans}) == 1, "all ranks run as many micro-batches"
    for batch in (b for rank in plans for b in rank if b):
        members = [sequences[i] for i in batch]
        assert tokens_of(members) <= budget or len(batch) == 1, "a shared prompt counts once"
        packed = pack(members)
        assert packed.input_ids.numel() == tokens_of(members), "members of a group lie side by side"
    unshared = [Sequence(s.prompt_ids, s.completion_ids, s.rollout_logprobs, 1.0, 1.0) for s in sequences]
    shared, apart = loads(sequences, plans), loads(unshared, plan_microbatches(unshared, **settings))
    cost, without = (max(x) + 0.1 * sum(x) / ranks for x in (shared, apart))
    assert cost <= without * (1 + 1e-9), "sharing never costs more than it saves"
    if ranks == 1 and sum(tokens_of(grouped([g])) for g in groups) <= budget:
        assert len(plans[0]) <= 1 and shared[0] == sum(SHAPE.group_flops(p, c) for p, c in groups)
    assert plans == plan_microbatches(sequences, **settings), "a pure function of its arguments"


def test_a_group_is_cut_only_where_balance_gains_more_than_the_prompt_costs():
    def ranks_of_groups(groups, ranks):
        sequences = grouped(groups)
        plans = plan_microbatches(sequences, ranks=ranks, tokens_per_microbatch=10_000, shape=SHAPE)
        held = [{sequences[i].group for batch in rank for i in batch} for rank in plans]
        return [sum(number in rank for rank in held) for number in range(len(groups))]

    assert ranks_of_groups([(10, [50] * 8)], 2) == [2], "one group would leave a rank idle; its prompt is short"
    assert ranks_of_groups([(900, [10] * 4)], 2) == [1], "the prompt is nearly all of the work"
    assert ranks_of_groups([(10, [50] * 8)] * 4, 2) == [1] * 4, "whole groups balance"


def test_206_survivors_on_4_ranks():
    """P05: no rank needs a count that divides."""
    lengths = [10 + i % 37 for i in range(206)]
    plans = plan(lengths, 4, 256)
    assert sorted(i for rank in plans for b in rank for i in b) == list(range(206))
    loads = [sum(SHAPE.forward_flops(lengths[i]) for b in rank for i in b) for rank in plans]
    assert max(loads) / min(loads) < 1.02


def test_first_fit_fills_micro_batches():
    """300 tokens fit into three times 100, which first fit finds only by falling length."""
    lengths = [60, 50, 40, 40, 30, 30, 20, 20, 10]
    assert len(plan(lengths, 1, 100)[0]) == 3
