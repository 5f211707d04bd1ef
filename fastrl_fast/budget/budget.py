"""What every budget answers, and the plainest one."""

from abc import ABC, abstractmethod
from typing import Any

from ..types import Group, Prompt
from .ceiling import Ceiling
from .outcome import Outcome


class Budget(ABC):
    """Plans group sizes before sampling, may ask for more after grading, and learns from all ranks' outcomes.

    Every rank calls `plan`, `prompts_to_draw` and `observe` with the same arguments and so holds the same state, which
    is in the checkpoint as JSON.
    """

    @abstractmethod
    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        """Rollouts of each prompt's first round; 0 skips the prompt, and others are drawn in its place."""

    def weight(self, prompt: Prompt) -> float:
        """1 / the chance with which `plan` did not skip the prompt, where the lots are to be undone."""
        return 1.0

    def extend(self, groups: list[Group]) -> list[int]:
        """Further rollouts of each graded group, asked again until all are 0."""
        return [0] * len(groups)

    def prompts_to_draw(self, missing: int, *, target: int) -> int:
        """Prompts to sample when `missing` of the step's `target` groups are still to be found under a filter."""
        return missing

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        """Learn from a step's groups; `step` counts from 1."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"a budget without memory has no state, got {state}"


class FixedBudget(Budget):
    """The same number of rollouts for every prompt of a step: the ceiling's."""

    def __init__(self, ceiling: Ceiling) -> None:
        self.ceiling = ceiling

    def plan(self, prompts: list[Prompt], *, step: int) -> list[int]:
        return [self.ceiling.size] * len(prompts)

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        self.ceiling.observe(outcomes, step=step, total_steps=total_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.ceiling.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ceiling.load_state_dict(state)
