"""Prompts whose groups were all alike at their last visits are mostly not sampled at all (GRESO, arXiv 2506.02177)."""

from typing import Any

from ..draws import draw
from ..types import Prompt
from .budget import Budget
from .outcome import Outcome

EASY_FROM = 0.98
"""Share of right answers from which a group without differences counts as easy, else as hard."""
START, LEAST, MOST, CHANGE = 0.5, 0.05, 0.95, 0.01
"""The exploration probability's start, bounds and change per step."""
TARGETS = {"easy": 0.25 / 3, "hard": 0.25 * 2 / 3}
"""Shares of easy and hard groups without differences that the probabilities are steered to: 25 % in all."""
ALWAYS = 0.01
"""Smallest chance of a prompt to be sampled."""


class GresoBudget(Budget):
    """Samples a prompt with chance max(p^z, 0.01), z being the number of its latest visits in a row without differences
    in reward, p = p_easy or p_hard by how the latest ended.

    From the second epoch on, after each step p falls by 0.01 where the share of such groups among the sampled ones
    reaches its target, and rises by 0.01 where it does not (algorithms.md 3.3).
    """

    def __init__(self, group_size: int, *, seed: int, epoch_steps: int) -> None:
        self.group_size, self.seed, self.epoch_steps = group_size, seed, epoch_steps
        self.chance = {"easy": START, "hard": START}
        self.alike: dict[str, tuple[int, str]] = {}
        self.dead_share = 0.0

    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        return [self.group_size if self._sampled(prompt, step) else 0 for prompt in prompts]

    def _sampled(self, prompt: Prompt, step: int) -> bool:
        visits, kind = self.alike.get(prompt.id, (0, "hard"))
        return draw(self.seed, step, "greso", prompt.id) < max(self.chance[kind] ** visits, ALWAYS)

    def prompts_to_draw(self, missing: int, *, target: int) -> int:
        """1.25 x missing / (1 - share of dead groups in the last step), between a quarter and 1.5 of the target."""
        wanted = int(1.25 * missing / max(1 - self.dead_share, 1e-3))
        return max(target // 4, min(wanted, target * 3 // 2))

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        ended: list[str] = []
        for outcome in outcomes:
            if outcome.graded and outcome.dead:
                kind = "easy" if outcome.right >= EASY_FROM * outcome.graded else "hard"
                self.alike[outcome.prompt_id] = (self.alike.get(outcome.prompt_id, (0, kind))[0] + 1, kind)
                ended.append(kind)
            else:
                self.alike.pop(outcome.prompt_id, None)
        if not outcomes:
            return
        self.dead_share = len(ended) / len(outcomes)
        if step > self.epoch_steps:
            for kind, target in TARGETS.items():
                change = -CHANGE if ended.count(kind) / len(outcomes) >= target else CHANGE
                self.chance[kind] = min(max(self.chance[kind] + change, LEAST), MOST)

    def state_dict(self) -> dict[str, Any]:
        alike = {prompt_id: list(entry) for prompt_id, entry in self.alike.items()}
        return {"chance": dict(self.chance), "alike": alike, "dead_share": self.dead_share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance = dict(state["chance"])
        self.alike = {prompt_id: (visits, kind) for prompt_id, (visits, kind) in state["alike"].items()}
        self.dead_share = state["dead_share"]
