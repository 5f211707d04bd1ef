"""The settings of the policy objective."""

from dataclasses import dataclass, field
from typing import Literal

from .rules import not_negative, positive, require

LossKind = Literal["grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "cispo"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ImportanceKind = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric"
]


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig:
    """Correction of the loss for samples of a distribution other than the policy's own (sampler and trainer never agree
    to the last bit)."""

    kind: ImportanceKind = "none"
    """Weights exp(old logprob - rollout logprob) on the advantages: token_truncate (TIS) cuts each token's at the cap,
    token_mask (IcePop) drops tokens outside the bounds; sequence_truncate and sequence_mask do so with the product over
    a completion; sequence_geometric keeps, unweighted, completions whose mean weight per token (the product's root) is
    within the bounds, which then belong near 1, as 0.999 and 1.001; none: no weights."""
    cap: float = 2.0
    """Largest weight."""
    floor: float = 0.5
    """Smallest weight that the masks and the geometric filter let pass."""

    def __post_init__(self) -> None:
        positive("loss.importance", cap=self.cap)
        rule = f"in [0, loss.importance.cap ({self.cap})]"
        require(0 <= self.floor <= self.cap, "loss.importance.floor", rule, self.floor)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy objective."""

    kind: LossKind = "grpo"
    """Row of settings: grpo, dapo, dr_grpo, gspo, gspo_token, cispo. The fields below override the row where given."""
    clip_low: float | None = None
    """Ratios are clipped below at 1 - clip_low; by default the kind's own."""
    clip_high: float | None = None
    """Ratios are clipped above at 1 + clip_high; by default the kind's own."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages, in units of the advantage (verl's clip_ratio_c); by default none."""
    aggregation: Aggregation | None = None
    """How token losses are summed over a step; by default the kind's own."""
    kl_coef: float = 0.0
    """Weight of the KL penalty against the frozen starting model; 0 = no reference model at all."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: k1 = log ratio, k2 = half its square, k3 = low-variance (exp(-r) - 1 + r)."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)

    def __post_init__(self) -> None:
        not_negative("loss", kl_coef=self.kl_coef)
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"loss.{name}", "0 or greater", value)
        require(self.dual_clip is None or self.dual_clip > 1, "loss.dual_clip", "greater than 1", self.dual_clip)
        if self.kind in ("gspo", "gspo_token"):
            rule = f"none or of sequences where loss.kind is {self.kind}"
            require(not self.importance.kind.startswith("token"), "loss.importance.kind", rule, self.importance.kind)
