"""Which loss of the policy is computed: the settings that `policy_loss` and `fused_policy_loss` share."""

import math
from typing import NamedTuple

from torch import Tensor

from fastrl_fast.ops._lib import check

RATIO_KINDS = ("token", "sequence", "sequence_token")
CLIP_KINDS = ("ppo", "cispo")
KL_KINDS = ("k1", "k2", "k3")
"""In the order of the enums of csrc/kernels/policy_loss.h."""


class LossSettings(NamedTuple):
    """With advantage A, ratio r, c = r cut to [1 - clip_low, 1 + clip_high], and d = logprob - ref.

    Log ratios are cut to [-20, 20] before any exponential.
    """

    ratio: str = "token"
    """`token` r = exp(logprob - old); `sequence` r = exp of the sequence's mean log ratio; `sequence_token` the same
    number, each token moving only its own term."""
    clip: str = "ppo"
    """`ppo` l = max(-A r, -A c); `cispo` l = -c A logprob with c constant."""
    kl: str = "k3"
    """`k1` k = d; `k2` k = d^2 / 2; `k3` k = e^-d - 1 + d."""
    clip_low: float = 0.2
    """>= 0."""
    clip_high: float = 0.2
    """>= 0."""
    dual_clip: float | None = None
    """> 1: where A < 0 `ppo` is at most -A dual_clip. None: no such bound."""
    kl_coef: float = 0.0
    """>= 0; above 0 needs reference logprobs."""

    def numbers(self) -> tuple[int, int, int, float, float, float, float]:
        """What the compiled operators take: kinds by their number, no bound as infinity."""
        bound = math.inf if self.dual_clip is None else float(self.dual_clip)
        kinds = RATIO_KINDS.index(self.ratio), CLIP_KINDS.index(self.clip), KL_KINDS.index(self.kl)
        return (*kinds, float(self.clip_low), float(self.clip_high), bound, float(self.kl_coef))


def check_loss(settings: LossSettings, ref_logprobs: Tensor | None) -> None:
    for name, allowed in (("ratio", RATIO_KINDS), ("clip", CLIP_KINDS), ("kl", KL_KINDS)):
        value = getattr(settings, name)
        check(value in allowed, f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    for name in ("clip_low", "clip_high", "kl_coef"):
        number = getattr(settings, name)
        check(number >= 0, f"{name} must be >= 0, not {number}")
    dual_clip, kl_coef = settings.dual_clip, settings.kl_coef
    check(dual_clip is None or dual_clip > 1, f"dual_clip must be > 1 or None, not {dual_clip}")
    check(kl_coef == 0 or ref_logprobs is not None, f"kl_coef = {kl_coef} needs ref_logprobs")
