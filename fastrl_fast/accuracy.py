"""How often the policy is right on held-out prompts: avg@k and pass@k."""

import math
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from . import distributed
from .config import Config, EvalConfig, RewardConfig
from .data import PromptData
from .grading import Grading
from .rewards import Grader
from .rollout import Sampler
from .types import ImageReader, Prompt

RIGHT = 0.99
"""A graded value of at least this is a right answer."""

EVAL_STEP = -1
"""Stands for the step in the sampling seed, so that evaluations at any step draw the same random numbers."""


def pass_at_k(total: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k completions is right, from `right` of `total`.

    1 - C(total - right, k) / C(total, k) (Chen et al. 2021, arXiv 2107.03374). Raises ValueError unless
    1 <= k <= total.
    """
    if not 1 <= k <= total:
        raise ValueError(f"k must be in [1, {total}], got {k}")
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


class Accuracy:
    """Samples every held-out prompt `config.samples` times, always with the same seed, and grades by one reward
    function."""

    def __init__(self, prompts: list[Prompt], grader: Grader, *, reward: str, config: EvalConfig, seed: int) -> None:
        self.prompts = prompts
        self.grader = grader
        self.reward = reward
        self.config = config
        self.seed = seed

    def measure(self, sampler: Sampler) -> dict[str, float]:
        """Return {"avg@k", "pass@k", "ungraded"} over all prompts and ranks; pass@1, 2, 4 ... up to k.

        Raises ValueError on all ranks where the sampler of any finds a request wrong.
        """
        mine = self.prompts[distributed.share(len(self.prompts))]
        k = self.config.samples
        grading = Grading(self.grader, mine, expected=k * len(mine))
        distributed.together(
            lambda: sampler.sample(
                mine,
                [k] * len(mine),
                seed=self.seed,
                step=EVAL_STEP,
                temperature=self.config.temperature,
                finished=grading.add,
            )
        )
        counts = distributed.gather_lists(self._count(grading))
        ks = sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})
        result = {f"avg@{k}": _mean([right / k for right, _ in counts])}
        result |= {f"pass@{n}": _mean([pass_at_k(k, right, n) for right, _ in counts]) for n in ks if n > 1}
        return result | {"ungraded": float(sum(ungraded for _, ungraded in counts))}

    def _count(self, grading: Grading) -> list[tuple[int, int]]:
        """(right, not gradable) per group; what could not be graded is not right."""
        counts = []
        for _, results in distributed.together(grading.result):
            own = [result[self.reward] for result in results]
            counts.append((sum(v is not None and v >= RIGHT for v in own), sum(v is None for v in own)))
        return counts


def build_grader(config: RewardConfig) -> Grader:
    """Start the grading processes. Raises ValueError for a reward function that is not there."""
    try:
        return Grader(config.terms, workers=config.workers, timeout=config.timeout)
    except ValueError as error:
        raise ValueError(f"reward.functions: {error}") from error


def build_accuracy(
    config: Config, tokenizer: PreTrainedTokenizerBase, grader: Grader, images: ImageReader | None = None
) -> Accuracy | None:
    """The held-out measurement, or None where no held-out data is configured."""
    prompts = held_out_prompts(config, tokenizer, images)
    if not prompts:
        return None
    reward = config.eval.reward or next(iter(config.reward.functions))
    return Accuracy(prompts, grader, reward=reward, config=config.eval, seed=config.seed)


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None = None
) -> list[Prompt]:
    """The prompts to measure on; none where no held-out data is configured."""
    if config.eval.path is None:
        return []
    settings = replace(config.data, path=config.eval.path, split=config.eval.split, prompts_per_step=1, shuffle=False)
    data = PromptData(settings, tokenizer, seed=config.seed, section="eval", images=images)
    return data.first(config.eval.prompts)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
