"""Putting dropped rollouts back until their number divides (FastRL, step 4 of MDAP); we need it nowhere ourselves."""

from dataclasses import dataclass

from ..drop_reasons import ALIKE, LOT, REJECTED, SIMILAR, SMALL
from ..types import Group

RETURNABLE = (SIMILAR, LOT, SMALL, ALIKE, REJECTED)
"""Drop reasons of rollouts that a rule took out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a group could give back: its number in the step, how many it keeps, and the indices of those that were
    dropped, largest |A| first."""

    group: int
    kept: int
    dropped: tuple[int, ...]


def offers(groups: list[Group], *, kl: bool) -> list[Offer]:
    """One offer per group; rollouts of zero advantage are worth nothing without a KL term."""
    made = []
    for group in groups:
        rollouts = group.rollouts
        dropped = [i for i, r in enumerate(rollouts) if r.drop_reason in RETURNABLE and (kl or r.advantage != 0)]
        dropped.sort(key=lambda i: -abs(rollouts[i].advantage))
        made.append(Offer(group.number, sum(r.kept for r in rollouts), tuple(dropped)))
    return made


def put_back(groups: list[Group], everywhere: list[Offer], *, multiple: int) -> None:
    """Keep rollouts again until the number kept on all ranks is a multiple of `multiple`, or none is left.

    Round-robin over the groups of the step, the largest |A| of each first. `everywhere` are the offers of all ranks.
    """
    need = -sum(offer.kept for offer in everywhere) % multiple
    in_turn = [
        (place, offer.group, index)
        for offer in sorted(everywhere, key=lambda offer: offer.group)
        for place, index in enumerate(offer.dropped)
    ]
    chosen = {(group, index) for _, group, index in sorted(in_turn, key=lambda turn: turn[:2])[:need]}
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            if (group.number, index) in chosen:
                rollout.drop_reason = ""
