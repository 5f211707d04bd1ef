"""The table and the plot of bench.methods: means with 95 % intervals over seeds, paired with plain training."""

import importlib.util
import json
import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 %, two-sided, at 1, 2 ... degrees of freedom."""
TRAINING = ("flops/old", "flops/reference", "flops/update")


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: totals, held-out accuracy at the end, and accuracy by cost along the way."""

    objective: str
    method: str
    seed: int
    avg: float
    passed: float
    totals: dict[str, float]
    curve: list[tuple[float, float, float]]
    """(FLOPs so far, seconds of steps so far, avg@k) at each evaluation."""

    @classmethod
    def read(cls, folder: Path, objective: str, method: str, seed: int) -> "Run":
        summary = json.loads((folder / "summary.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        after = {name.split("@")[0]: value for name, value in summary["after"].items() if name.endswith("@8")}
        flops = accumulate(sum(step[name] for name in ("flops/generation", *TRAINING)) for step in steps)
        seconds = accumulate(step["seconds/step"] for step in steps)
        curve = [
            (cost, time, step["eval/avg@8"])
            for step, cost, time in zip(steps, flops, seconds, strict=True)
            if "eval/avg@8" in step
        ]
        return cls(objective, method, seed, after["avg"], after["pass"], summary["totals"], curve)

    @property
    def training(self) -> float:
        return sum(self.totals[name] for name in TRAINING)

    @property
    def flops(self) -> float:
        return self.training + self.totals["flops/generation"]

    @property
    def update_seconds(self) -> float:
        return self.totals["seconds/score"] + self.totals["seconds/update"]

    def cost_to(self, accuracy: float) -> float | None:
        """FLOPs until an evaluation reached `accuracy`; None where none did."""
        return next((cost for cost, _, avg in self.curve if avg >= accuracy), None)

    def line(self) -> str:
        kept = self.totals["rollouts/kept"] / self.totals["rollouts/generated"]
        return f"avg@8 {self.avg:.3f}  pass@8 {self.passed:.3f}  kept {kept:.0%}  {self.flops / 1e12:.3f} TFLOPs"


def interval(values: list[float]) -> str:
    """Mean and half of the 95 % interval by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {half(values):.3f}"


def half(values: list[float]) -> float:
    freedom = len(values) - 1
    quantile = T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.4 / freedom
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def table(runs: list[Run]) -> str:
    """Markdown: a row per objective and method; ratios are plain / method, paired by seed, above 1 is cheaper."""
    head = ["run", "seeds", "avg@8", "pass@8", "avg@8 - plain", "rollouts", "kept"]
    head += ["training FLOPs ÷", "all FLOPs ÷", "score + update time ÷", "FLOPs to plain's end ÷"]
    rows = [head, ["---"] * len(head)]
    for objective, method in dict.fromkeys((run.objective, run.method) for run in runs):
        mine = {run.seed: run for run in runs if (run.objective, run.method) == (objective, method)}
        plain = {run.seed: run for run in runs if (run.objective, run.method) == (objective, "plain")}
        pairs = [(plain[seed], run) for seed, run in mine.items() if seed in plain]
        rows.append([f"{objective} {method}", str(len(mine)), *_accuracy(list(mine.values()), pairs), *_cost(pairs)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _accuracy(mine: list[Run], pairs: list[tuple[Run, Run]]) -> list[str]:
    generated = sum(run.totals["rollouts/generated"] for run in mine)
    kept = sum(run.totals["rollouts/kept"] for run in mine) / generated
    cells = [interval([run.avg for run in mine]), interval([run.passed for run in mine])]
    cells.append(interval([run.avg - plain.avg for plain, run in pairs]) if pairs else "")
    return [*cells, f"{generated / len(mine):.0f}", f"{kept:.0%}"]


def _cost(pairs: list[tuple[Run, Run]]) -> list[str]:
    if not pairs:
        return [""] * 4
    measures: list[Callable[[Run], float]] = [
        lambda run: run.training,
        lambda run: run.flops,
        lambda run: run.update_seconds,
    ]
    cells = [interval([measure(plain) / max(measure(run), 1e-9) for plain, run in pairs]) for measure in measures]
    target = statistics.fmean(plain.avg for plain, _ in pairs)
    reached = [(plain.flops, cost) for plain, run in pairs if (cost := run.cost_to(target)) is not None]
    ratio = f"{statistics.median(whole / cost for whole, cost in reached):.2f} " if reached else ""
    return [*cells, f"{ratio}({len(reached)} of {len(pairs)})"]


def plot(runs: list[Run], path: Path) -> None:
    """Accuracy over training FLOPs, a panel per objective, bars are 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    objectives = list(dict.fromkeys(run.objective for run in runs))
    figure, axes = pyplot.subplots(1, len(objectives), figsize=(5.5 * len(objectives), 4.5), squeeze=False)
    for axis, objective in zip(axes[0], objectives, strict=True):
        for method in dict.fromkeys(run.method for run in runs if run.objective == objective):
            mine = [run for run in runs if (run.objective, run.method) == (objective, method)]
            accuracy = [run.avg for run in mine]
            cost = statistics.fmean(run.training for run in mine) / 1e12
            error = half(accuracy) if len(mine) > 1 else 0.0
            axis.errorbar(cost, statistics.fmean(accuracy), yerr=error, fmt="o", capsize=3, label=method)
        axis.set(title=objective, xlabel="training TFLOPs (old, reference, update)", ylabel="held-out avg@8")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_report(runs: list[Run], folder: Path, *, command: str, settings: str) -> str:
    """Write methods.md and, where matplotlib is installed, methods.png; return the table."""
    text = table(runs)
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    notes = f"`{command}` {settings}, {date.today()}, {machine}. ± is a 95 % interval over seeds; ÷ is plain / method."
    notes += "\nTimes are of runs one after another: on a machine that others use they say little."
    notes += " FLOPs are computed, not timed."
    (folder / "methods.md").write_text(f"{text}\n\n{notes}\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        plot(runs, folder / "methods.png")
    else:
        print("no plot: pip install 'fastrl_fast[report]'")
    return text
