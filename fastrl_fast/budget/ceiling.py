"""The largest group of a step: fixed, or lowered as pruning keeps fewer rollouts (FastRL's adaptive rollout
sampling)."""

from typing import Any, Protocol

from .outcome import Outcome


class Ceiling(Protocol):
    """A group size that may change from step to step."""

    size: int

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedCeiling:
    """Always the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        """A fixed ceiling learns nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"a fixed ceiling has no state, got {state}"


class ArsCeiling:
    """One size for all prompts, set anew at the end of each epoch (FastRL, ARS; algorithms.md 1.3).

    Of each step m is the mean and M the largest number of rollouts that stayed in a group; of an epoch, mean_e and
    max_e are the averages of m and M. With a = step / total_steps: G = a mean_e + (1 - a) max_e, D = max(G_ref - G, 0),
    size = max(round(start - D), least), where G_ref = (mean_1 + max_1) / 2 of the first epoch.

    The authors' code also counts the first step of an epoch to the one before and forgets all this on resume.
    """

    def __init__(self, start: int, *, least: int, epoch_steps: int) -> None:
        self.start, self.least, self.epoch_steps = start, least, epoch_steps
        self.size = start
        self.reference: float | None = None
        self.means: list[float] = []
        self.maxima: list[int] = []

    def observe(self, outcomes: list[Outcome], *, step: int, total_steps: int) -> None:
        stayed = [outcome.stayed for outcome in outcomes if outcome.trained]
        if stayed:
            self.means.append(sum(stayed) / len(stayed))
            self.maxima.append(max(stayed))
        if step % self.epoch_steps == 0 and self.means:
            self._end_epoch(step / total_steps)

    def _end_epoch(self, progress: float) -> None:
        mean, largest = sum(self.means) / len(self.means), sum(self.maxima) / len(self.maxima)
        self.means, self.maxima = [], []
        if self.reference is None:
            self.reference = (mean + largest) / 2
        aim = progress * mean + (1 - progress) * largest
        self.size = max(round(self.start - max(self.reference - aim, 0.0)), self.least)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("size", "reference", "means", "maxima")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size, self.reference = state["size"], state["reference"]
        self.means, self.maxima = list(state["means"]), list(state["maxima"])
