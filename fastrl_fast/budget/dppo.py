"""Prompts that taught nothing at their last visit are skipped by lot, with weights that undo the lot (after DPPO)."""

from typing import Any

from ..draws import draw
from ..types import Prompt
from .budget import Budget
from .outcome import Outcome


class DppoBudget(Budget):
    """Samples a prompt whose last group had no differences with chance 1 - skip and weight 1 / (1 - skip), any other
    always and with weight 1; others are drawn in place of the skipped ones.

    The expected weighted sum over the sampled prompts is the sum over the drawn ones. After the prompt-level lot of
    arXiv 2603.04135, whose formula and split rule we have not seen (algorithms.md 3.4).
    """

    def __init__(self, group_size: int, *, skip: float, seed: int) -> None:
        self.group_size, self.skip, self.seed = group_size, skip, seed
        self.dead: set[str] = set()

    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        return [self.group_size if self._sampled(prompt, step) else 0 for prompt in prompts]

    def _sampled(self, prompt: Prompt, step: int) -> bool:
        return prompt.id not in self.dead or draw(self.seed, step, "dppo", prompt.id) >= self.skip

    def weight(self, prompt: Prompt) -> float:
        return 1 / (1 - self.skip) if prompt.id in self.dead else 1.0

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        for outcome in outcomes:
            (self.dead.add if outcome.dead else self.dead.discard)(outcome.prompt_id)

    def state_dict(self) -> dict[str, Any]:
        return {"dead": sorted(self.dead)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dead = set(state["dead"])
