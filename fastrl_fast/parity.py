"""Proof, after every hand-over of weights, that an engine samples from the policy that is trained."""

import torch

from . import distributed, packing
from .config import Config
from .data import PromptData
from .model import Policy
from .rollout import EngineSampler
from .types import ImageReader

PROMPTS = 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
"""By model.dtype, mean |logprob of the engine - logprob of the policy| in nats. In float32 vLLM on a CPU came to 7e-6
at most, for any token; 0.03 is the bound of the alarm `sampler_gap`."""


class ParityCheck:
    """Compares logprobs of a few completions that an engine samples with the policy's own."""

    def __init__(self, config: Config, data: PromptData, images: ImageReader | None) -> None:
        settings = config.rollout.vllm
        self.tolerance = settings.parity_tolerance or TOLERANCE[config.model.dtype]
        self.stops = settings.parity == "stop"
        self._data, self._images = data, images

    @torch.no_grad()
    def run(self, policy: Policy, sampler: EngineSampler) -> str:
        """Return what is wrong, or nothing; all ranks call this together, each with one forward pass.

        Raises ValueError instead where the config says that a run stops.
        """
        groups = distributed.together(lambda: sampler.probe(self._data.first(PROMPTS)))
        sequences = [
            packing.Sequence(
                group.prompt.token_ids, rollout.completion_ids, rollout.rollout_logprobs, 0.0, 0.0, None,
                group.prompt.pictures,
            )
            for group in groups
            for rollout in group.rollouts
        ]  # fmt: skip
        read = self._images.pixel_values if self._images else None
        batch = packing.pack(sequences, read).to(next(policy.parameters()).device)
        logprobs, _ = policy(batch)
        gaps = (logprobs - batch.rollout_logprobs).abs().double()
        mean = float(gaps.mean()) if gaps.numel() else 0.0
        # Written so that NaN fails.
        wrong = [gap for gap in distributed.gather_lists([mean]) if not gap <= self.tolerance]
        if not wrong:
            return ""
        problem = (
            f"the engine's logprobs differ from the policy's by {max(wrong):.2g} in the mean, more than "
            f"rollout.vllm.parity_tolerance ({self.tolerance:g}): it does not sample from the policy that is trained"
        )
        if self.stops:
            raise ValueError(problem)
        return problem
