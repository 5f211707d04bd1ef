"""Which sequences share a micro-batch: balanced over ranks, shared prompts once, as many on every rank."""

import heapq
import math

from .packing import ModelShape, Sequence, microbatch_flops

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Largest parts of a rank's fair share that groups are tried to be cut into, where whole ones do not balance."""

WASTE = 0.1
"""Weight of the mean rank's FLOPs beside the busiest one's: all wait for that, but a prompt computed twice is work."""


def plan_microbatches(
    sequences: list[Sequence], *, ranks: int, tokens_per_microbatch: int, shape: ModelShape
) -> list[list[list[int]]]:
    """Return for each rank its micro-batches as lists of indices into `sequences`, the same number for every rank.

    Groups, costliest first, go to the rank with the least FLOPs so far; inside a rank they are packed first-fit by
    falling tokens into micro-batches of at most `tokens_per_microbatch` tokens, a shared prompt counting once (a longer
    sequence has one of its own; a longer group is cut). Groups are kept whole, or cut into parts of at most 1, 1/2, 1/4
    or 1/8 of a rank's fair share, or into sequences, whichever makes the FLOPs of the busiest rank (and a little, of
    all) least, with prompts that are then computed more than once. Ranks with fewer micro-batches get empty ones. The
    plan is a pure function of its arguments, so all ranks agree without talking.
    """
    groups = _grouped(sequences, list(range(len(sequences))))

    def cost(members: list[int]) -> float:
        return microbatch_flops([sequences[i] for i in members], shape)

    def planned(largest: float) -> tuple[float, list[list[list[int]]]]:
        parts = [part for group in groups for part in _cut(sequences, group, cost(group), largest)]
        plans = [
            _microbatches(_grouped(sequences, sorted(members)), sequences, tokens_per_microbatch)
            for members in _spread(parts, [cost(part) for part in parts], ranks)
        ]
        loads = [sum(map(cost, plan)) for plan in plans]
        return max(loads) + WASTE * sum(loads) / ranks, plans

    best = planned(float("inf"))
    if ranks > 1 and len(groups) < len(sequences):
        fair = sum(map(cost, groups)) / ranks
        best = min([best, *(planned(share * fair) for share in SHARES)], key=lambda plan: plan[0])
    count = max(len(plan) for plan in best[1])
    return [plan + [[]] * (count - len(plan)) for plan in best[1]]


def _grouped(sequences: list[Sequence], members: list[int]) -> list[list[int]]:
    """Those that share a prompt side by side; in order of first appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index in members:
        number = sequences[index].group
        groups.setdefault(("alone", index) if number is None else ("group", number), []).append(index)
    return list(groups.values())


def _cut(sequences: list[Sequence], group: list[int], cost: float, largest: float) -> list[list[int]]:
    """Deal a group that costs more than `largest` into parts of like completion tokens."""
    count = len(group) if largest * len(group) <= cost else max(1, math.ceil(cost / largest))
    if count == 1:
        return [group]
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [(0, number) for number in range(count)]
    for index in sorted(group, key=lambda i: (-len(sequences[i]), i)):
        held, number = tokens[0]
        parts[number].append(index)
        heapq.heapreplace(tokens, (held + len(sequences[index].completion_ids), number))
    return [sorted(part) for part in parts]


def _spread(parts: list[list[int]], costs: list[float], ranks: int) -> list[list[int]]:
    """The members of the parts that each rank gets: costliest first, to the rank with the least so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    spread: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(parts)), key=lambda n: (-costs[n], n)):
        load, rank = loads[0]
        spread[rank] += parts[number]
        heapq.heapreplace(loads, (load + costs[number], rank))
    return spread


def _microbatches(groups: list[list[int]], sequences: list[Sequence], room: int) -> list[list[int]]:
    """Pack one rank's groups first-fit by falling tokens; a group that does not fit into one micro-batch is cut."""
    pieces = []
    for group in groups:
        prompt = len(sequences[group[0]].prompt_ids)
        lengths = [len(sequences[i].completion_ids) for i in group]
        pieces += [[group[i] for i in piece] for piece in _first_fit(lengths, room - prompt)]
    tokens = [
        len(sequences[piece[0]].prompt_ids) + sum(len(sequences[i].completion_ids) for i in piece) for piece in pieces
    ]
    return [[i for piece in fits for i in pieces[piece]] for fits in _first_fit(tokens, room)]


def _first_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Fill bins of `room` by falling size; one that is larger has a bin of its own."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = next((b for b, left in enumerate(free) if left >= sizes[index]), None)
        if fits is None:
            bins.append([index])
            free.append(room - sizes[index])
        else:
            bins[fits].append(index)
            free[fits] -= sizes[index]
    return bins
