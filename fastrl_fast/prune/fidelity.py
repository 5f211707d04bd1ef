"""How much of a group's gradient pruning left, judged before any forward pass."""

import torch

from .. import ops
from ..types import Group
from .vectors import borders, gradient_sketches


def measure_fidelity(groups: list[Group], advantages: list[list[float]]) -> None:
    """Set the `fidelity` of every group: cos(sum over all of A v, sum over kept of w A' v) in the space of gradient
    sketches, A being the `advantages` before and A' those after pruning.

    1 without a sketch where nothing with an advantage was dropped and nothing was weighed.
    """
    changed = [(g, before) for g, before in zip(groups, advantages, strict=True) if _changed(g, before)]
    if not changed:
        return
    # The operator takes one advantage per rollout: a new one is a weight on the old one. Where the old one is 0 there
    # is no such weight, and the rollout counts as nothing.
    weights = [
        r.weight * r.advantage / a if r.kept and a != 0 else 0.0
        for group, before in changed
        for r, a in zip(group.rollouts, before, strict=True)
    ]
    fidelity = ops.group_fidelity(
        gradient_sketches([group for group, _ in changed]),
        torch.tensor([a for _, before in changed for a in before], dtype=torch.float32),
        torch.tensor(weights, dtype=torch.float32),
        borders([len(group.rollouts) for group, _ in changed]),
    )
    for (group, _), value in zip(changed, fidelity.tolist(), strict=True):
        group.fidelity = value


def _changed(group: Group, before: list[float]) -> bool:
    return any(
        a != 0 and not (r.kept and r.weight == 1 and r.advantage == a)
        for r, a in zip(group.rollouts, before, strict=True)
    )
