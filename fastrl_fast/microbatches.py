"""Which sequences share a micro-batch: balanced over ranks, shared prompts once, as many on every rank."""

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from .packing import ModelShape, Sequence

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Largest parts of a rank's fair share that groups are tried to be cut into, where whole ones do not balance."""

WASTE = 0.1
"""Weight of the mean rank's FLOPs beside the busiest one's: all wait for that, but a prompt computed twice is work."""

Held = dict[int, list[int]]
"""What a rank holds: of a group, by its number, which sequences."""


def plan_microbatches(
    sequences: list[Sequence], *, ranks: int, tokens_per_microbatch: int, shape: ModelShape
) -> list[list[list[int]]]:
    """Return for each rank its micro-batches as lists of indices into `sequences`, the same number for every rank.

    Groups, costliest first, go to the rank with the least FLOPs so far; inside a rank they are packed best-fit by
    falling tokens into micro-batches of at most `tokens_per_microbatch` tokens, a shared prompt counting once (a longer
    sequence has one of its own; a longer group is cut). Groups are kept whole, or cut into parts of at most 1, 1/2, 1/4
    or 1/8 of a rank's fair share, or into sequences, whichever makes the FLOPs of the busiest rank (and a little, of
    all) least, with prompts that are then computed more than once. Ranks with fewer micro-batches get empty ones. The
    plan is a pure function of its arguments, so all ranks agree without talking.
    """
    work = Work.of(sequences, shape, room=tokens_per_microbatch)
    whole = [work.flops(group, members) for group, members in enumerate(work.groups)]
    fair, added = sum(whole) / ranks, sum(work.added_flops)
    lowest, best = math.inf, [Held() for _ in range(ranks)]
    tried: list[list[int]] = []
    shares = SHARES if ranks > 1 and len(whole) < len(sequences) else ()
    for largest in (math.inf, *(share * fair for share in shares)):
        counts = [_parts(len(g), flops, largest) for g, flops in zip(work.groups, whole, strict=True)]
        prompts = sum(flops * min(n, ranks) for flops, n in zip(work.prompt_flops, counts, strict=True))
        # The busiest rank is no less busy than the mean one.
        if counts in tried or (1 + WASTE) * (added + prompts) / ranks >= lowest:
            continue
        tried.append(counts)
        held = work.spread(counts, ranks)
        loads = [sum(work.flops(*item) for item in of_rank.items()) for of_rank in held]
        if (score := max(loads) + WASTE * sum(loads) / ranks) < lowest:
            lowest, best = score, held
    plans = [work.microbatches(of_rank) for of_rank in best]
    count = max(len(plan) for plan in plans)
    return [plan + [[]] * (count - len(plan)) for plan in plans]


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences in groups that share a prompt, those that share none alone, and what each costs.

    prompt_tokens, prompt_flops: by group; tokens, added_flops: of each sequence's completion, by sequence; room: tokens
    of a micro-batch.
    """

    groups: list[list[int]]
    prompt_tokens: list[int]
    prompt_flops: list[float]
    tokens: list[int]
    added_flops: list[float]
    room: int

    @classmethod
    def of(cls, sequences: list[Sequence], shape: ModelShape, *, room: int) -> "Work":
        numbered: dict[tuple[str, int], list[int]] = {}
        for index, sequence in enumerate(sequences):
            key = ("alone", index) if sequence.group is None else ("group", sequence.group)
            numbered.setdefault(key, []).append(index)
        groups = list(numbered.values())
        prompts = [len(sequences[members[0]].prompt_ids) for members in groups]
        tokens = [len(sequence.completion_ids) for sequence in sequences]
        added = [shape.completion_flops(len(s.prompt_ids), n) for s, n in zip(sequences, tokens, strict=True)]
        return cls(groups, prompts, [shape.forward_flops(prompt) for prompt in prompts], tokens, added, room)

    def flops(self, group: int, members: list[int]) -> float:
        """One forward pass over some of a group on one rank, with a prompt in each micro-batch that they need."""
        return self.prompt_flops[group] * len(self._pieces(group, members)) + sum(self.added_flops[i] for i in members)

    def spread(self, counts: list[int], ranks: int) -> list[Held]:
        """What each rank holds with every group cut into as many parts as `counts` says: costliest parts first, to the
        rank with the least so far."""
        parts = [
            (self.flops(group, part), group, part)
            for group, count in enumerate(counts)
            for part in self._cut(self.groups[group], count)
        ]
        parts.sort(key=lambda part: -part[0])
        loads = [(0.0, rank) for rank in range(ranks)]
        held: list[Held] = [{} for _ in range(ranks)]
        for flops, group, part in parts:
            load, rank = loads[0]
            held[rank].setdefault(group, []).extend(part)
            heapq.heapreplace(loads, (load + flops, rank))
        return held

    def microbatches(self, held: Held) -> list[list[int]]:
        """Pack what a rank holds; a group that does not fit into one micro-batch is cut."""
        pieces, sizes = [], []
        for group, members in sorted(held.items()):
            for piece in self._pieces(group, sorted(members)):
                pieces.append(piece)
                sizes.append(self.prompt_tokens[group] + sum(self.tokens[i] for i in piece))
        return [[i for number in fits for i in pieces[number]] for fits in _best_fit(sizes, self.room)]

    def _pieces(self, group: int, members: list[int]) -> list[list[int]]:
        """Cut what does not fit behind one prompt in one micro-batch."""
        room = self.room - self.prompt_tokens[group]
        if len(members) == 1 or sum(self.tokens[i] for i in members) <= room:
            return [members]
        return [[members[n] for n in fits] for fits in _best_fit([self.tokens[i] for i in members], room)]

    def _cut(self, members: list[int], count: int) -> list[list[int]]:
        """Deal a group out into parts of like completion tokens."""
        if count == 1:
            return [members]
        parts: list[list[int]] = [[] for _ in range(count)]
        tokens = [(0, number) for number in range(count)]
        for index in sorted(members, key=lambda i: -self.tokens[i]):
            held, number = tokens[0]
            parts[number].append(index)
            heapq.heapreplace(tokens, (held + self.tokens[index], number))
        return [sorted(part) for part in parts]


def _parts(members: int, flops: float, largest: float) -> int:
    """Of how many parts a group is made, so that none costs more than `largest`; one for each member at most."""
    return members if largest * members <= flops else max(1, math.ceil(flops / largest))


def _best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Fill bins of `room` by falling size, each into the fullest bin that has room; one that is larger has its own."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect_left(free, (sizes[index], 0))
        if place < len(free):
            left, number = free.pop(place)
            bins[number].append(index)
        else:
            left, number = room, len(bins)
            bins.append([index])
        insort(free, (left - sizes[index], number))
    return bins
