"""Rollouts where they are expected to tell most: a knapsack over the prompts of a step (Knapsack RL, 2509.25849)."""

import heapq
from typing import Any

from ..types import Prompt
from .budget import Budget
from .outcome import Outcome


def dead_chance(size: int, rate: float) -> float:
    """p^N + (1 - p)^N: the chance that a group of N shows one outcome only."""
    return rate**size + (1 - rate) ** size


def value(size: int, rate: float) -> float:
    """V(N, p) = (1 - p^N - (1 - p)^N) p (1 - p)^2: the chance of a mixed group times what it teaches."""
    return (1 - dead_chance(size, rate)) * rate * (1 - rate) ** 2


def allocate(rates: list[float | None], *, group_size: int, low: int, high: int) -> list[int]:
    """Sizes that maximise sum V(N_i, p_i) with sum N_i <= group_size x prompts and low <= N_i <= high.

    `rates` are earlier success rates. A prompt without one gets `group_size`; one that was always right or always wrong
    gets `low`, and what the others cannot use goes to the always wrong ones. V is concave in N, so taking the largest
    next gain each time reaches the optimum.
    """
    sizes = [group_size if rate is None else low for rate in rates]
    left = group_size * len(rates) - sum(sizes)
    gains = [(value(low, p) - value(low + 1, p), i) for i, p in enumerate(rates) if p is not None and 0 < p < 1]
    heapq.heapify(gains)
    while left > 0 and gains and low < high:
        _, i = heapq.heappop(gains)
        sizes[i] += 1
        left -= 1
        rate = rates[i]
        assert rate is not None, "only prompts with a rate are in the heap"
        if sizes[i] < high:
            heapq.heappush(gains, (value(sizes[i], rate) - value(sizes[i] + 1, rate), i))
    hard = [i for i, rate in enumerate(rates) if rate == 0]
    while left > 0 and (open_ones := [i for i in hard if sizes[i] < high]):
        for i in open_ones[:left]:
            sizes[i] += 1
        left -= min(left, len(open_ones))
    return sizes


class KnapsackBudget(Budget):
    """Allocates each step's rollouts by the success rates of the prompts' latest visits."""

    def __init__(self, group_size: int, *, low: int, high: int) -> None:
        self.group_size, self.low, self.high = group_size, low, high
        self.rates: dict[str, float] = {}

    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        rates = [self.rates.get(prompt.id) for prompt in prompts]
        return allocate(rates, group_size=self.group_size, low=self.low, high=self.high)

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        self.rates.update((o.prompt_id, o.right / o.graded) for o in outcomes if o.graded)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = dict(state["rates"])
