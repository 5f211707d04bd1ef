"""How many rollouts each prompt gets."""

from typing import Any, Protocol

from .config import BudgetConfig
from .types import Group, Prompt


class Budget(Protocol):
    """Plans group sizes before sampling and learns from the groups after pruning; its state is in the checkpoint."""

    def plan(self, prompts: list[Prompt]) -> list[int]: ...

    def observe(self, groups: list[Group]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedBudget:
    """The same number of rollouts for every prompt."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def plan(self, prompts: list[Prompt]) -> list[int]:
        return [self.group_size] * len(prompts)

    def observe(self, groups: list[Group]) -> None:
        """A fixed budget learns nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"a fixed budget has no state, got {state}"


def build_budget(config: BudgetConfig) -> Budget:
    return FixedBudget(config.group_size)
