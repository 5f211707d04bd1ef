"""The targets of a fused loss in the order in which they are walked, and the slope of the loss at each."""

import math
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops.importance import IMPORTANCE_KINDS, Importance, importance_weights
from fastrl_fast.ops.loss_settings import RATIO_KINDS
from fastrl_fast.ops.policy_loss import PolicyLossStats

TOKEN = RATIO_KINDS.index("token")


class Columns(NamedTuple):
    """What the loss reads besides the logprobs: [N], but [S] and [S + 1] for the last three."""

    old: Tensor | None
    ref: Tensor | None
    rollout: Tensor | None
    token_weights: Tensor | None
    advantages: Tensor
    weights: Tensor
    cu_targets: Tensor


class LossNumbers(NamedTuple):
    """`LossSettings` and `Importance` as the operator takes them."""

    ratio: int
    clip: int
    kl: int
    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    importance: int
    cap: float
    floor: float


class LossRows:
    """Targets with a gradient first, those known to have none behind them; each part in its old order.

    A unit is what must be seen at once: a token, or a whole sequence where its tokens depend on each other. Before the
    first update every ratio is 1, so that tokens of equal weight stand alone whatever the ratio is of.
    """

    def __init__(self, columns: Columns, settings: LossNumbers, dtype: torch.dtype) -> None:
        def cast(x: Tensor | None) -> Tensor | None:
            return x if x is None else x.to(dtype)

        old, ref, rollout, factors = map(cast, columns[:4])
        a, w, cu = columns.advantages.to(dtype), columns.weights.to(dtype), columns.cu_targets
        importance = Importance(IMPORTANCE_KINDS[settings.importance], settings.cap, settings.floor)
        corrected = importance.kind != "none"
        known = None
        if corrected and old is not None and rollout is not None:
            known = importance_weights(*_unmasked(old, rollout, factors), cu, importance)[0]
            a = a * known if importance.of_sequences else a
        a_token, w_token = (torch.repeat_interleave(x, cu.diff()) for x in (a, w))
        if known is not None and not importance.of_sequences:
            a_token = a_token * known
        w_token = w_token if factors is None else w_token * factors
        # Without a gradient these rows need no logits of their own to be kept.
        quiet = (w_token == 0) | (a_token == 0) if settings.kl_coef == 0 else w_token == 0
        before = torch.cat([cu.new_zeros(1), (~quiet).cumsum(0)])
        self.order = torch.argsort(quiet.to(torch.int8), stable=True)
        self.moving = int(before[-1])
        self.sparse = old is not None or importance.masks
        """Whether the slope of a row with an advantage may be 0."""
        self.borders: list[int] | None = None
        """Offsets of the units where they are sequences."""
        self._importance = importance if corrected and old is None else None
        alone = old is None and factors is None
        self._settings = settings._replace(ratio=TOKEN) if alone else settings
        self._old, self._ref, self._rollout = (None if x is None else x[self.order] for x in (old, ref, rollout))
        if self._settings.ratio != TOKEN or (self._importance is not None and importance.of_sequences):
            moving = before[cu]
            self._cu = torch.cat([moving, self.moving + (cu - moving)[1:]])
            self.borders = self._cu.tolist()
            self._a, self._w = a.repeat(2), w.repeat(2)
            self._factors = None if factors is None else factors[self.order]
        else:
            self._a, self._w, self._factors = a_token[self.order], w_token[self.order], None
        self._parts: list[tuple[Tensor, Tensor]] = []

    def slope(self, logprobs: Tensor, rows: slice) -> Tensor:
        """Return d loss / d logprob of a stretch of whole units, and take note of its part of loss and statistics."""
        old, ref, rollout, factors = (
            None if x is None else x[rows] for x in (self._old, self._ref, self._rollout, self._factors)
        )
        if self.borders is None:
            units, cu = rows, torch.arange(logprobs.shape[0] + 1, device=logprobs.device)
        else:
            units = slice(*(bisect_left(self.borders, at) for at in (rows.start, rows.stop)))
            cu = self._cu[units.start : units.stop + 1] - rows.start
        a = self._a[units]
        if self._importance is not None and rollout is not None:
            a = a * importance_weights(logprobs, rollout, cu, self._importance)[0]
        loss, gradient, stats = torch.ops.fastrl_fast.policy_loss(
            logprobs, old, ref, rollout, a, self._w[units], factors, cu, *self._settings[:7]
        )
        self._parts.append((loss.double(), stats))
        return gradient

    def totals(self) -> tuple[Tensor, Tensor]:
        """Loss and statistics of all stretches, added in their order, float64."""
        loss = self._w.new_zeros((), dtype=torch.float64)
        names = PolicyLossStats._fields
        stats = self._w.new_zeros(len(names), dtype=torch.float64)
        lowest, highest = names.index("ratio_min"), [names.index("ratio_max"), names.index("sampler_gap_max")]
        stats[lowest] = math.inf
        stats[highest] = -math.inf
        for part_loss, part in self._parts:
            loss += part_loss
            merged = stats + part
            merged[lowest] = torch.minimum(stats[lowest], part[lowest])
            merged[highest] = torch.maximum(stats[highest], part[highest])
            stats = merged
        return loss, stats


def _unmasked(old: Tensor, rollout: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both logprobs, equal where a token is masked: whatever these are, it weighs nothing in its sequence."""
    if factors is None:
        return old, rollout
    return torch.where(factors == 0, 0, old), torch.where(factors == 0, 0, rollout)
