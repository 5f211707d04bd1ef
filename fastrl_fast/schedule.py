"""When the rollouts of a step are sampled: in turn with the updates, or one step ahead of them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from . import distributed
from .collect import Collected, Collector, ShortStep
from .data import PromptData
from .interrupt import Interrupt, Interrupted, Recall, fulfil
from .metrics import Clock
from .rollout import EngineLost
from .saved_rollouts import from_tensors, to_tensors

SECONDS_TO_ARRIVE = 10.0
"""A run that was asked to stop waits so long for rollouts on their way; torchrun kills what is left after 30 s."""
SECONDS_TO_END = 5.0
"""A thread whose rollouts nobody wants any more gets so long to end."""


class Schedule(Protocol):
    """What a trainer asks for the rollouts of its steps; all ranks call each of these together."""

    collector: Collector

    def take(self, step: int) -> Collected:
        """The graded groups of a step; where a rank was asked to stop it is Interrupted, as if the step had not
        begun."""
        ...

    def before_update(self, step: int) -> None:
        """The budget knows what `step` collected, and the policy is still that of its beginning."""
        ...

    def after_update(self) -> None: ...

    def before_evaluation(self) -> None:
        """Have the sampler free, with the weights of the policy."""
        ...

    def state(self) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        """Wait for rollouts on their way; what a checkpoint keeps of them: the same of all ranks as JSON, and this
        rank's."""
        ...

    def load_state(self, state: dict[str, Any], parts: list[dict[str, Tensor]]) -> None:
        """Go on with these, of as many ranks as are this one's to look after."""
        ...

    def settle(self) -> None:
        """Of a run that was asked to stop: wait a little for rollouts on their way, then forget them."""
        ...

    def close(self) -> None:
        """Forget rollouts on their way."""
        ...


class InTurn:
    """A step's rollouts are sampled when it begins, from the policy as it is then; `refresh` hands its weights over
    unless the sampler has them."""

    def __init__(
        self, collector: Collector, data: PromptData, interrupt: Interrupt, *, refresh: Callable[[], None]
    ) -> None:
        self.collector = collector
        self._data, self._interrupt, self._refresh = data, interrupt, refresh

    def take(self, step: int) -> Collected:
        before = self._data.state_dict()
        try:
            try:
                collected = self.collector.collect(step)
            except ShortStep:
                self._interrupt.check()  # then it is short because it was cut short
                raise
            self._interrupt.check()
            return collected
        except Interrupted:
            self._data.load_state_dict(before)
            raise

    def before_update(self, step: int) -> None: ...

    def after_update(self) -> None:
        self._refresh()

    def before_evaluation(self) -> None: ...

    def state(self) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        return None, {}

    def load_state(self, state: dict[str, Any], parts: list[dict[str, Tensor]]) -> None:
        raise AssertionError("rollouts are in the checkpoints of OneAhead alone")

    def settle(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Flight:
    """Rollouts on their way, sampled from the policy after `policy_steps` steps; the data's cursor stood at
    `before`."""

    policy_steps: int
    before: dict[str, Any]
    rollouts: "Future[Collected]" = field(default_factory=Future)

    @property
    def arrived(self) -> bool | None:
        """Whether they are there and whole; None while they are on their way."""
        return self.rollouts.exception() is None if self.rollouts.done() else None


class OneAhead:
    """The next step's rollouts are sampled and graded in a thread of their own while the policy is updated.

    The sampler gets weights between two steps' rollouts, when nothing is on its way. So rollouts are of the policy one
    step ago; those of a run's first step, and of one that goes on without rollouts, of the policy itself. Budgets know
    the outcomes of all steps before. `recall` cuts the collector's work short; `refresh` hands the weights over unless
    the sampler has them; `clock` counts as sampling what is waited for.
    """

    def __init__(
        self,
        collector: Collector,
        data: PromptData,
        interrupt: Interrupt,
        *,
        recall: Recall,
        refresh: Callable[[], None],
        clock: Clock,
        total_steps: int,
    ) -> None:
        self.collector = collector
        self._data, self._interrupt, self._recall, self._refresh = data, interrupt, recall, refresh
        self._clock, self._total_steps = clock, total_steps
        self._flight: Flight | None = None

    def take(self, step: int) -> Collected:
        flight = self._flight or self._start(step, policy_steps=step)
        self._land(flight)
        self._interrupt.check()
        self._flight = None
        collected = flight.rollouts.result()
        collected.counts["rollout/staleness"] = float(step - flight.policy_steps)
        return collected

    def before_update(self, step: int) -> None:
        if step + 1 < self._total_steps:
            self._start(step + 1, policy_steps=step)

    def after_update(self) -> None: ...

    def before_evaluation(self) -> None:
        if self._flight is not None and not self._land(self._flight):
            self._interrupt.check()  # no weights for an engine that is lost
        self._refresh()

    def state(self) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        if self._flight is not None and not self._land(self._flight):
            self.close()  # what went wrong comes again when the step does
        if self._flight is None:
            return None, {}
        collected = self._flight.rollouts.result()
        state = {"policy_steps": self._flight.policy_steps, "before": self._flight.before, "counts": collected.counts}
        return state, to_tensors(collected)

    def load_state(self, state: dict[str, Any], parts: list[dict[str, Tensor]]) -> None:
        collected = from_tensors(parts, {prompt.id: prompt for prompt in self._data.first(len(self._data))})
        collected.counts = state["counts"]
        self._flight = Flight(state["policy_steps"], state["before"])
        self._flight.rollouts.set_result(collected)

    def settle(self) -> None:
        if self._flight is not None:
            wait([self._flight.rollouts], timeout=SECONDS_TO_ARRIVE)
            if not all(distributed.gather_lists([self._flight.arrived])):
                self.close()

    def close(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            if not flight.rollouts.done():
                self._recall.ask()
                wait([flight.rollouts], timeout=SECONDS_TO_END)
            self._data.load_state_dict(flight.before)

    def _start(self, step: int, *, policy_steps: int) -> Flight:
        self._refresh()
        self._flight = flight = Flight(policy_steps, self._data.state_dict())
        work = partial(fulfil, flight.rollouts, partial(self._collect, step))
        threading.Thread(target=work, name="rollouts", daemon=True).start()
        return flight

    def _collect(self, step: int) -> Collected:
        began = time.perf_counter()
        collected = self.collector.collect(step)
        if self._interrupt.lost:
            raise EngineLost(self._interrupt.lost)
        if self._interrupt.wrong:
            raise self._interrupt.wrong
        collected.counts["rollout/seconds"] = time.perf_counter() - began
        return collected

    def _land(self, flight: Flight) -> bool:
        """Wait for the rollouts; whether they are whole on all ranks. Raises Interrupted where the wait was cut short,
        and at once what only this rank can know of: the others' threads may wait for this one's for ever."""
        with self._clock.measure("sample"):
            self._interrupt.cut_short(lambda: wait([flight.rollouts]), lambda: None)
        if flight.arrived is False and not isinstance(flight.rollouts.exception(), (ValueError, EngineLost)):
            flight.rollouts.result()
        arrived = distributed.gather_lists([flight.arrived])
        if None in arrived:
            self._interrupt.check()
        return all(arrived)
