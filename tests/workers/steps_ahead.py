"""Runs with rollouts one step ahead on several ranks: `steps_ahead.py FOLDER SERVER_URLS`.

Writes whole.pt, and stopped.pt of a run that rank 1 asks to stop and that goes on; the last run breaks on purpose in
the thread of rank 1.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import torch

from fastrl_fast import distributed
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import (
    BudgetConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.interrupt import Interrupted
from fastrl_fast.model import full_weights
from fastrl_fast.rewards import Grader
from fastrl_fast.rollout_config import VllmConfig
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Trainer
from fastrl_fast.training_run import TrainingRun
from fastrl_fast.types import Group

STEPS = 4
LENGTH = Path(__file__).with_name("length_reward.py")


def settings(folder: Path, servers: list[str]) -> Config:
    vllm = VllmConfig(servers=servers, weights="folder", weights_folder=str(folder / "weights"), parity="warn")
    return Config(
        model=ModelConfig(path="builtin:demo"),
        data=DataConfig(path="demo:train?size=64", prompts_per_step=4),
        rollout=RolloutConfig(engine="vllm_server", steps_ahead=1, max_completion_tokens=8, vllm=vllm),
        reward=RewardConfig(functions={f"{LENGTH}:length": 1.0}, workers=1),
        budget=BudgetConfig(kind="aero_ars", group_size=3, max_group_size=6, epoch_steps=2),
        updates=UpdatesConfig(old_logprobs="rollout"),
        optimizer=OptimizerConfig(lr=1e-3),
    )


class Watched(Trainer):
    """Keeps what each step trained on, and asks to stop or breaks where it is told to."""

    stops = breaks = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: list[Any] = []
        self.staleness: list[float] = []
        if self.breaks and distributed.rank() == 1:
            self.schedule.collector.budget.extend = self.broken  # type: ignore[method-assign]

    def broken(self, groups: list[Group]) -> list[int]:
        if self.steps_done >= 1:
            raise RuntimeError("broken on purpose")
        return [0] * len(groups)

    def prune(self, groups: list[Group]) -> None:
        ids = [(group.number, [rollout.completion_ids for rollout in group.rollouts]) for group in groups]
        self.seen.append(sorted(distributed.gather_lists(ids)))
        super().prune(groups)

    def update(self, updates: list) -> Any:
        if self.stops and self.steps_done == 1 and distributed.rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        return super().update(updates)

    def step(self) -> dict[str, float]:
        metrics = super().step()
        self.staleness.append(metrics["rollout/staleness"])
        return metrics


def make(config: Config, grader: Grader, device: torch.device, folder: Path) -> TrainingRun:
    parts = build_parts(config, load_inputs(config, grader), grader, device, folder=folder, log=None)
    return TrainingRun(Watched(config, parts, total_steps=STEPS))


def main() -> None:
    folder, servers = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    device = distributed.start()
    config = settings(folder, servers)

    def keep(name: str, runs: list[TrainingRun], **more: Any) -> None:
        trainers: list[Any] = [run.trainer for run in runs]
        rollouts = [seen for trainer in trainers for seen in trainer.seen]
        staleness = [value for trainer in trainers for value in trainer.staleness]
        result = {"weights": weights(runs[-1]), "rollouts": rollouts, "staleness": staleness, **more}
        if distributed.rank() == 0:
            torch.save(result, folder / f"{name}.pt")

    with build_grader(config.reward) as grader:
        whole = make(config, grader, device, folder / "whole")
        start = weights(whole)
        whole.run()
        keep("whole", [whole], start=start)
        Watched.stops = True
        stopped = make(config, grader, device, folder / "stopped")
        try:
            stopped.run()
        except Interrupted:
            Watched.stops = False
        again = make(config, grader, device, folder / "stopped")
        again.resume()
        state, _ = again.trainer.schedule.state()
        again.run()
        keep("stopped", [stopped, again], restored=state is not None)
        Watched.breaks = True
        make(config, grader, device, folder / "broken").run()
    distributed.stop()


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_weights(run.parts.policy)}


if __name__ == "__main__":
    main()
