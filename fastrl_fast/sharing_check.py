"""Proof, on the first micro-batch where it matters, that sharing prompts changes no logprob of this model."""

import torch

from . import distributed, packing
from .model import Policy
from .types import PackedBatch

WORST = {"float64": 1e-8, "float32": 1e-3, "float16": 0.5, "bfloat16": 1.0}
"""Largest difference of one logprob, by the dtype that the model computes in; of their mean a twentieth of it.

About a hundred times what rounding does to models that were tried (float32 2e-6 in small, 2e-5 in 24-layer ones); a
completion that does not see its prompt, or sees another's, is off by more than 0.1 in the mean.
"""


class SharingCheck:
    """Compares logprobs behind shared prompts with those of whole sequences, once in a run."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.done = False

    @torch.no_grad()
    def run(self, policy: Policy, batches: list[PackedBatch]) -> None:
        """Check the first of this rank's micro-batches with a shared prompt; all ranks run two forward passes, or none.

        Raises ValueError on every rank where the difference is more than WORST allows on any.
        """
        if self.done:
            return
        shared = next((batch for batch in batches if batch.prefixes.shape[0]), None)
        if distributed.all_sum(torch.tensor(float(shared is not None))) == 0:
            return
        self.done = True
        dummy = packing.pack([]).to(next(policy.parameters()).device)
        alone, places = (dummy, dummy.targets) if shared is None else packing.alone(shared)
        together = policy(dummy if shared is None else shared)[0][places]
        difference = (together - policy(alone)[0]).abs().double()
        distributed.together(lambda: self._judge(difference))

    def _judge(self, difference: torch.Tensor) -> None:
        if difference.numel() == 0:
            return
        worst, mean, allowed = float(difference.max()), float(difference.mean()), WORST[self.dtype]
        # Written so that NaN fails.
        if not (worst <= allowed and mean <= allowed / 20):
            raise ValueError(
                "updates.share_prompts must be false for this model: logprobs of completions behind a shared prompt "
                f"differ from those of whole sequences by up to {worst:.2g} and {mean:.2g} in the mean, where rounding "
                f"in {self.dtype} explains {allowed:g} and {allowed / 20:g}"
            )
