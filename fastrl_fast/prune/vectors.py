"""What a rollout looks like to rules that compare whole vectors: a sketch of its gradient, or its set of n-grams."""

import math

import torch
from torch import Tensor

from .. import ops
from ..method_config import PruneConfig
from ..types import Group

WIDTH = 1024
"""Buckets of a gradient sketch: cosines are off by about 1 / 32."""


def similarity_vectors(groups: list[Group], config: PruneConfig) -> Tensor:
    """[N, width] float32, one row per rollout; their cosines are what `config.similarity` calls similar."""
    if config.similarity == "gradient":
        return gradient_sketches(groups)
    factors = [jaccard_factors([r.completion_ids for r in group.rollouts], ngram=config.ngram) for group in groups]
    width = max((len(rows) for rows in factors), default=0)
    padded = [[*row, *[0.0] * (width - len(row))] for rows in factors for row in rows]
    return torch.tensor(padded, dtype=torch.float32).reshape(len(padded), width)


def gradient_sketches(groups: list[Group]) -> Tensor:
    """[N, WIDTH] float32 from token ids and the sampler's logprobs (`ops.gradient_sketch`)."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return ops.gradient_sketch(
        torch.tensor([token for r in rollouts for token in r.completion_ids], dtype=torch.int64),
        torch.tensor([logprob for r in rollouts for logprob in r.rollout_logprobs], dtype=torch.float32),
        borders([len(r.completion_ids) for r in rollouts]),
        width=WIDTH,
    )


def jaccard_factors(texts: list[list[int]], *, ngram: int) -> list[list[float]]:
    """Vectors of length 1 whose inner products are the Jaccard similarities of the texts' n-gram sets.

    These similarities form a positive semidefinite matrix; its Cholesky factor's rows are the vectors. Two empty sets
    are equal.
    """
    sets = [{tuple(text[i : i + ngram]) for i in range(len(text) - ngram + 1)} for text in texts]
    rows: list[list[float]] = []
    for i, mine in enumerate(sets):
        row = [0.0] * len(sets)
        for j in range(i):
            if rows[j][j] > 0:
                row[j] = (_jaccard(mine, sets[j]) - sum(row[m] * rows[j][m] for m in range(j))) / rows[j][j]
        rest = 1 - sum(x * x for x in row)
        # What is left of a text that others span is rounding.
        row[i] = math.sqrt(rest) if rest > 1e-9 else 0.0
        rows.append(row)
    return rows


def _jaccard(a: set[tuple[int, ...]], b: set[tuple[int, ...]]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common) if a or b else 1.0


def cosines(vectors: Tensor) -> Tensor:
    """[n, n] float64; two zero vectors are alike, a zero vector and another are not."""
    # Products of sketches are exact in float64, so that no order of addition changes a decision.
    products = vectors.double() @ vectors.double().T
    lengths = products.diagonal().sqrt()
    sizes = lengths[:, None] * lengths
    zero = lengths == 0
    return torch.where(sizes > 0, products / sizes.clamp(min=1e-300), (zero[:, None] & zero).double())


def borders(counts: list[int]) -> Tensor:
    """[0, n_1, n_1 + n_2, ...]."""
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
