"""How many rollouts each prompt gets: before sampling, and again after seeing the first ones' rewards."""

from ..config import Config
from ..method_config import ARS
from .budget import Budget, FixedBudget
from .ceiling import ArsCeiling, Ceiling, FixedCeiling
from .dppo import DppoBudget
from .greso import GresoBudget
from .knapsack import KnapsackBudget
from .outcome import Outcome
from .rounds import RoundsBudget

__all__ = ["Budget", "Outcome", "build_budget"]


def build_budget(config: Config, *, prompts: int) -> Budget:
    """The budget of `config.budget.kind`; the data's number of prompts sets the length of an epoch."""
    c = config.budget
    epoch_steps = c.epoch_steps or _epoch_steps(config, prompts)
    start = c.group_size if c.kind in ("fixed", "ars") else c.max_group_size
    ceiling: Ceiling = FixedCeiling(start)
    if c.kind in ARS:
        ceiling = ArsCeiling(start, least=c.min_group_size, epoch_steps=epoch_steps)
    if c.kind in ("fixed", "ars"):
        return FixedBudget(ceiling)
    if c.kind == "knapsack":
        return KnapsackBudget(c.group_size, low=c.min_group_size, high=c.max_group_size)
    if c.kind == "dppo":
        return DppoBudget(c.group_size, skip=c.skip, seed=config.seed)
    if c.kind == "greso":
        return GresoBudget(c.group_size, seed=config.seed, epoch_steps=epoch_steps)
    both = c.kind == "reinforce_ada" and c.until == "balanced"
    right, wrong = ((config.prune.keep + 1) // 2, (config.prune.keep + 1) // 2) if both else (1, 0)
    return RoundsBudget(c.group_size, extra=c.extra, ceiling=ceiling, right=right, wrong=wrong)


def _epoch_steps(config: Config, prompts: int) -> int:
    """Steps of one pass over the data; of a run that ends before its second pass, a tenth of its steps."""
    one_pass = max(1, prompts // config.data.prompts_per_step)
    total = config.max_steps or config.epochs * one_pass
    return one_pass if total >= 2 * one_pass else max(1, total // 10)
