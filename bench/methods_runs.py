"""Finished runs of bench.methods, as its tables need them."""

import json
import statistics
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path

PHASES = ("generation", "old", "reference", "update")
"""Of FLOPs; all but the first are training."""
CLOCKS = ("sample", "grade", "prune", "score", "update")
"""Of seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run: totals, held-out accuracy at the end, and accuracy by cost along the way."""

    objective: str
    method: str
    seed: int
    steps: int
    avg: float
    passed: float
    totals: dict[str, float]
    fidelity: float | None
    """Mean over the steps; None for runs from before it was reported."""
    curve: list[tuple[float, float, float]]
    """(FLOPs so far, seconds of steps so far, avg@8) at each evaluation."""
    finished: date

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """The run of a folder named OBJECTIVE-METHOD-SEED."""
        objective, method, seed = folder.name.split("-")
        summary = json.loads((folder / "summary.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        flops = accumulate(sum(step[f"flops/{phase}"] for phase in PHASES) for step in steps)
        seconds = accumulate(step["seconds/step"] for step in steps)
        fidelity = [step["prune/fidelity"] for step in steps if "prune/fidelity" in step]
        return cls(
            objective=objective,
            method=method,
            seed=int(seed),
            steps=len(steps),
            avg=summary["after"]["avg@8"],
            passed=summary["after"]["pass@8"],
            totals=summary["totals"],
            fidelity=statistics.fmean(fidelity) if fidelity else None,
            curve=[
                (cost, time, step["eval/avg@8"])
                for step, cost, time in zip(steps, flops, seconds, strict=True)
                if "eval/avg@8" in step
            ],
            finished=date.fromtimestamp((folder / "summary.json").stat().st_mtime),
        )

    @property
    def training(self) -> float:
        """FLOPs of old, reference and update."""
        return sum(self.totals[f"flops/{phase}"] for phase in PHASES[1:])

    @property
    def whole(self) -> float:
        """FLOPs of training had nothing been dropped, dead groups included: what GRPO costs elsewhere."""
        return self.training + sum(self.totals[f"flops_saved/{phase}"] for phase in PHASES[1:])

    @property
    def flops(self) -> float:
        return self.training + self.totals["flops/generation"]

    @property
    def whole_with_generation(self) -> float:
        return self.whole + self.totals["flops/generation"]

    def seconds(self, clock: str) -> float:
        return self.totals.get(f"seconds/{clock}", 0.0)

    @property
    def training_seconds(self) -> float:
        return self.seconds("score") + self.seconds("update")

    @property
    def kept(self) -> float:
        return self.totals["rollouts/kept"] / self.totals["rollouts/generated"]

    def cost_to(self, accuracy: float) -> tuple[float, float] | None:
        """FLOPs and seconds until an evaluation reached `accuracy`; None where none did."""
        return next(((cost, time) for cost, time, avg in self.curve if avg >= accuracy), None)

    def line(self) -> str:
        return f"avg@8 {self.avg:.3f}  pass@8 {self.passed:.3f}  kept {self.kept:.0%}  {self.flops / 1e12:.3f} TFLOPs"


def find(folder: Path) -> list[Run]:
    """The finished runs of a folder, by objective and method as they were first made, then by seed."""
    runs = [Run.read(path.parent) for path in folder.glob("*-*-*/summary.json")]
    return sorted(runs, key=lambda run: (run.objective, run.method != "plain", run.method, run.seed))
