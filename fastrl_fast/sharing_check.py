"""Proof, on the first micro-batch where it matters, that sharing prompts changes no logprob of this model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from . import distributed, packing
from .model import ROUNDING, Policy
from .types import PackedBatch, Picture


class SharingCheck:
    """Compares logprobs behind shared prompts with those of whole sequences, once in a run."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.done = False

    @torch.no_grad()
    def run(self, policy: Policy, batches: list[PackedBatch]) -> None:
        """Check the first of this rank's micro-batches with a shared prompt; all ranks run two forward passes, or none.

        Raises ValueError on every rank where the difference is more than ROUNDING allows on any, or its mean
        more than a twentieth of it.
        """
        if self.done:
            return
        shared = next((batch for batch in batches if batch.prefixes.shape[0]), None)
        if distributed.all_sum(torch.tensor(float(shared is not None))) == 0:
            return
        self.done = True
        dummy = packing.pack([]).to(next(policy.parameters()).device)
        whole, places = (dummy, dummy.targets) if shared is None else alone(shared)
        together = policy(dummy if shared is None else shared)[0][places]
        difference = (together - policy(whole)[0]).abs().double()
        distributed.together(lambda: self._judge(difference))

    def _judge(self, difference: Tensor) -> None:
        if difference.numel() == 0:
            return
        worst, mean, allowed = float(difference.max()), float(difference.mean()), ROUNDING[self.dtype]
        # Written so that NaN fails.
        if not (worst <= allowed and mean <= allowed / 20):
            raise ValueError(
                "updates.share_prompts must be false for this model: logprobs of completions behind a shared prompt "
                f"differ from those of whole sequences by up to {worst:.2g} and {mean:.2g} in the mean, where rounding "
                f"in {self.dtype} explains {allowed:g} and {allowed / 20:g}"
            )


def alone(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """The first and the last completion behind the first and the last shared prompt, as whole sequences.

    Returns a micro-batch of them, and where its targets lie among those of `batch`.
    """
    borders, tokens = batch.cu_seqlens.tolist(), batch.input_ids.tolist()
    prefixes, cuts = batch.prefixes.tolist(), batch.cu_targets.tolist()
    prompts = {start for start, _, _ in prefixes}
    completions = [(a, b) for a, b in pairwise(borders) if a not in prompts or a == b]
    sequences, places = [], []
    for start, middle, end in prefixes[:: max(1, len(prefixes) - 1)]:
        behind = [n for n, (a, b) in enumerate(completions) if middle <= a and b <= end]
        for number in (behind[0], behind[-1]):
            a, b = completions[number]
            pictures = tuple(replace(p, start=p.start - start) for p in batch.pictures if start <= p.start < middle)
            nothing = [0.0] * (b - a)
            sequences.append(packing.Sequence(tokens[start:middle], tokens[a:b], nothing, 0.0, 0.0, None, pictures))
            places.append(torch.arange(cuts[number], cuts[number + 1]))
    return packing.pack(sequences, partial(_held_pixels, batch)).to(batch.input_ids.device), torch.cat(places).to(
        batch.input_ids.device
    )


def _held_pixels(batch: PackedBatch, pictures: Sequence[Picture]) -> Tensor:
    """Pixels that the micro-batch has read already; one file is one image, wherever it stands."""
    assert batch.pixel_values is not None, "a row with pictures has their pixels"
    pixels = batch.pixel_values.split([picture.patches for picture in batch.pictures])
    held = dict(zip((picture.data for picture in batch.pictures), pixels, strict=True))
    return torch.cat([held[picture.data] for picture in pictures])
