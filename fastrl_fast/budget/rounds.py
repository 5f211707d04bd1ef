"""Rollouts in rounds: every prompt gets a first one, and some get more until they have shown what is asked for."""

from typing import Any

from ..types import Group, Prompt
from .budget import Budget
from .ceiling import Ceiling
from .outcome import Outcome


class RoundsBudget(Budget):
    """`first` rollouts for every prompt, then `extra` at a time until `right` right and `wrong` wrong answers were
    seen or the ceiling is reached.

    AERO's exploration and iterative rescue are right = 1, wrong = 0 (reconstruction; algorithms.md 2.4); Reinforce-Ada
    (arXiv 2510.04996) is the same for its exit `positive`, and right = wrong = n / 2 for `balanced`.
    """

    def __init__(self, first: int, *, extra: int, ceiling: Ceiling, right: int, wrong: int) -> None:
        self.first, self.extra, self.ceiling = first, extra, ceiling
        self.right, self.wrong = right, wrong

    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        return [min(self.first, self.ceiling.size)] * len(prompts)

    def extend(self, groups: list[Group]) -> list[int]:
        return [0 if self._seen(g) else max(0, min(self.extra, self.ceiling.size - len(g.rollouts))) for g in groups]

    def _seen(self, group: Group) -> bool:
        graded = [rollout.right for rollout in group.rollouts if rollout.graded]
        return sum(graded) >= self.right and len(graded) - sum(graded) >= self.wrong

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        self.ceiling.observe(outcomes, step=step, total_steps=total_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.ceiling.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ceiling.load_state_dict(state)
