"""A run from its first step, or where it was left, to its last: measured, logged, saved, and left when asked to."""

from typing import Any

from torch import Tensor

from . import distributed, savings
from .accuracy import Accuracy
from .alarms import Alarms
from .interrupt import Interrupted
from .metrics import phase
from .profiling import step_range
from .rollout import EngineSampler
from .trainer import Trainer

SECONDS_TO_SETTLE = 15.0
"""A run that ends by an error gives a save in flight so long; torchrun kills what is left 30 s after a rank failed."""


class TrainingRun:
    """Runs the steps of a trainer; `accuracy_before` and `accuracy_after` are what it measured on held-out prompts."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.parts = trainer.parts
        self.clock = trainer.clock
        self.interrupt = trainer.interrupt
        self.saved_at = 0
        self.unlogged: dict[str, float] | None = None
        self.accuracy_before: dict[str, float] = {}
        self.accuracy_after: dict[str, float] = {}
        self.alarms = Alarms(trainer.config)

    def run(self) -> None:
        """Train from where the run stands to its last step, measuring accuracy before, after and in between.

        Raises Interrupted on all ranks after SIGTERM or Ctrl-C on any, with what was done saved, and ValueError where a
        checkpoint cannot be written.
        """
        with self.interrupt.listening():
            try:
                self._run()
                self.parts.checkpointer.wait()
            except Interrupted:
                self.trainer.schedule.settle()
                if self.trainer.steps_done > self.saved_at:
                    self.save()
                self.parts.checkpointer.wait()
                raise
            finally:
                self.trainer.schedule.close()
                self.parts.checkpointer.settle(SECONDS_TO_SETTLE)

    def _run(self) -> None:
        if self.trainer.steps_done == 0:
            if isinstance(self.parts.sampler, EngineSampler):
                self.trainer.sync_sampler()  # a server may have the weights of another run
            self.accuracy_before = self.evaluate()
            self._say_accuracy()
            self.clock.take()
        while self.trainer.steps_done < self.trainer.total_steps or self.unlogged is not None:
            if self.unlogged is None:
                self.unlogged = self._step()
            self._end_step(self.unlogged)
        if not self.accuracy_after:
            self.accuracy_after = self.evaluate()

    def _say_accuracy(self) -> None:
        """A sign of life too: the first step may take minutes more."""
        if self.parts.log and self.accuracy_before:
            shown = ", ".join(f"{k} {v:.3f}" for k, v in self.accuracy_before.items() if k != "ungraded")
            self.parts.log.say(f"held-out before the first step: {shown}")

    def _step(self) -> dict[str, float]:
        number, log = self.trainer.steps_done + 1, self.parts.log
        traced = number in self.config.log.profile_steps
        with step_range(number, log.folder / "profile" if log and traced else None):
            return self.trainer.step()

    def _end_step(self, metrics: dict[str, float]) -> None:
        """Measure, log and save where it is due; a run that was left before that starts with it."""
        self.accuracy_after = {}
        if self._due(self.config.eval.every):
            self.accuracy_after = self.evaluate()
        self._log(metrics | {f"eval/{name}": value for name, value in self.accuracy_after.items()})
        self.unlogged = None
        if any(distributed.gather_lists([self.parts.checkpointer.failed])):
            self.parts.checkpointer.wait()
        if self._due(self.config.checkpoint.every):
            self.save()
        self.interrupt.check()

    def evaluate(self) -> dict[str, float]:
        if self.parts.accuracy is None:
            return {}
        self.trainer.schedule.before_evaluation()
        return self._measure(self.parts.accuracy)

    @phase("evaluate")
    def _measure(self, accuracy: Accuracy) -> dict[str, float]:
        measured = accuracy.measure(self.trainer.sampler)
        self.interrupt.check()
        return measured

    def save(self) -> None:
        """Start to write a checkpoint; training may go on."""
        self._save(*self.trainer.schedule.state())

    @phase("save")
    def _save(self, ahead: dict[str, Any] | None, rollouts: dict[str, Tensor]) -> None:
        state: dict[str, Any] = {
            "data": self.parts.data.state_dict(),
            "budget": self.parts.budget.state_dict(),
            "posterior": self.parts.posterior.state_dict(),
            "accuracy_before": self.accuracy_before,
            "accuracy": self.accuracy_after,
            "unlogged": self.unlogged and self._with_seconds(self.unlogged),
        }
        if ahead is not None:
            state["ahead"] = ahead
        steps, policy, optimizer = self.trainer.steps_done, self.parts.policy, self.parts.optimizer
        self.parts.checkpointer.save(steps, policy, optimizer, state, rollouts=rollouts)
        self.saved_at = self.trainer.steps_done

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False where there is none."""
        state = self.parts.checkpointer.load_newest(self.parts.policy, self.parts.optimizer)
        if state is None:
            return False
        self.trainer.steps_done = self.saved_at = state["step"]
        self.parts.data.load_state_dict(state["data"])
        self.parts.budget.load_state_dict(state["budget"])
        self.parts.posterior.load_state_dict(state["posterior"])
        self.accuracy_before, self.accuracy_after = state["accuracy_before"], state["accuracy"]
        self.unlogged = state["unlogged"]
        if "ahead" in state and self.parts.data.state_dict() == state["data"]:
            self.trainer.schedule.load_state(state["ahead"], self.parts.checkpointer.rollouts)
        self.trainer.sync_sampler()
        self.clock.take()
        return True

    def _due(self, every: int) -> bool:
        done = self.trainer.steps_done
        return done == self.trainer.total_steps or (every > 0 and done % every == 0)

    def _log(self, metrics: dict[str, float]) -> None:
        metrics = self._with_seconds(metrics)
        if self.parts.log:
            metrics |= self.alarms.check(metrics, self.parts.log.alarm)
            self.parts.log.step(self.trainer.steps_done, metrics | savings.seconds_saved(metrics, metrics))

    def _with_seconds(self, metrics: dict[str, float]) -> dict[str, float]:
        """With the seconds of each phase since the last time; those that a resumed run finds there already stay."""
        return {f"seconds/{name}": value for name, value in self.clock.take().items()} | metrics
