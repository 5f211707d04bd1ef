"""Weights with which the kept rollouts of a group stand for all of it."""

import math

import torch
from torch import Tensor

from ..drop_reasons import UNCHOSEN
from ..method_config import PruneConfig
from ..types import Group
from .rule import members
from .vectors import similarity_vectors


def match_weights(groups: list[Group], config: PruneConfig) -> None:
    """Weigh the kept rollouts of each group so that sum_kept w_i A_i v_i comes nearest to sum_all A_i v_i, w >= 0.

    The sum over all is over rollouts that have an advantage: under rules that take advantages anew, those that their
    first rule kept. A weight of 0 costs a forward pass and teaches nothing: such rollouts are dropped. Rollouts of zero
    advantage keep weight 1.
    """
    # A whole group stands for itself, to the last bit.
    pruned = [g for g in groups if any(r.advantage != 0 and not r.kept for r in g.rollouts)]
    vectors = similarity_vectors(pruned, config)
    begin = 0
    for group in pruned:
        own = vectors[begin : begin + len(group.rollouts)].double()
        begin += len(group.rollouts)
        kept = [i for i in members(group) if group.rollouts[i].advantage != 0 and bool(own[i].any())]
        pushes = own * own.new_tensor([[rollout.advantage] for rollout in group.rollouts])
        weights = non_negative(pushes[kept] @ pushes[kept].T, pushes[kept] @ pushes.sum(0))
        for i, weight in zip(kept, weights.tolist(), strict=True):
            group.rollouts[i].weight = weight
            if weight == 0:
                group.rollouts[i].drop_reason = UNCHOSEN


def non_negative(gram: Tensor, target: Tensor) -> Tensor:
    """The w >= 0, [n], that minimises w' gram w / 2 - target' w; gram [n, n] positive semidefinite with a positive
    diagonal. Members that others span get 0.

    Source: Lawson and Hanson 1974, chapter 23, as in csrc/kernels/cpu/choose_rollouts.cpp, whose set is not given.
    """
    weights = torch.zeros_like(target)
    refused: set[int] = set()
    # Each success lowers the objective; the bound is for rounding.
    for _ in range(3 * len(target)):
        pull = (target - gram @ weights) / gram.diagonal().sqrt()
        pull[[*refused, *weights.nonzero()[:, 0].tolist()]] = -math.inf
        entering = int(pull.argmax())
        if not pull[entering] > 1e-9 * target.abs().max():
            break
        better = _enter(entering, gram, target, weights)
        if better is None:
            refused.add(entering)
        else:
            weights, refused = better, set()
    return weights


def _enter(entering: int, gram: Tensor, target: Tensor, weights: Tensor) -> Tensor | None:
    """The weights with `entering` among the positive ones, and without those that it turns negative; None where it is
    of no use."""
    members, weights = [*weights.nonzero()[:, 0].tolist(), entering], weights.clone()
    solved = _solve(members, gram, target)
    if solved is None or solved[-1] <= 0:
        return None
    while solved is not None and bool((solved <= 0).any()):
        mine = weights[members]
        steps = torch.where(solved <= 0, mine / (mine - solved), 1.0)
        mine = torch.where((solved <= 0) & (steps <= steps.min()), 0.0, mine + steps.min() * (solved - mine))
        weights[members] = mine
        members = [m for m, weight in zip(members, mine.tolist(), strict=True) if weight > 0]
        solved = _solve(members, gram, target)
    if solved is None:
        return None
    answer = torch.zeros_like(weights)
    answer[members] = solved
    return answer


def _solve(members: list[int], gram: Tensor, target: Tensor) -> Tensor | None:
    """Least squares over the members alone; None where they span each other."""
    part = gram[members][:, members]
    factor, _ = torch.linalg.cholesky_ex(part)
    if not members or not bool((factor.diagonal() ** 2 > 1e-10 * part.diagonal()).all()):
        return None
    return torch.cholesky_solve(target[members, None], factor)[:, 0]
