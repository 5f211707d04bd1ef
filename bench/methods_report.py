"""The tables and the plot of bench.methods: means with 95 % intervals over seeds, paired with plain training."""

import importlib.util
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from .methods_runs import CLOCKS, PHASES, Run

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 %, two-sided, at 1, 2 ... degrees of freedom."""


def half(values: list[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    freedom = len(values) - 1
    quantile = T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: list[float], digits: int = 3) -> str:
    """Mean and half of the 95 % interval; the mean alone of a single value, nothing of none."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {half(values):.{digits}f}"


def by_method(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by (objective, method) in the order in which these first come."""
    rows: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.objective, run.method), []).append(run)
    return rows


def paired(runs: list[Run], objective: str, method: str) -> list[tuple[Run, Run]]:
    """(plain, method) of every seed that both have."""
    rows = by_method(runs)
    plain = {run.seed: run for run in rows.get((objective, "plain"), [])}
    return [(plain[run.seed], run) for run in rows.get((objective, method), []) if run.seed in plain]


def ratios(pairs: list[tuple[Run, Run]], measure: Callable[[Run], float], over: Callable[[Run], float]) -> list[float]:
    """`over` of plain by `measure` of the method, seed by seed; above 1 the method is cheaper."""
    return [over(plain) / max(measure(run), 1e-9) for plain, run in pairs]


def accuracy_table(runs: list[Run]) -> str:
    """Accuracy, its difference to plain, and what the training cost relative to plain."""
    head = ["run", "steps", "seeds", "avg@8", "pass@8", "avg@8 - plain", "pass@8 - plain"]
    head += ["rollouts", "kept", "fidelity", "training FLOPs ÷", "training FLOPs ÷ of all rollouts"]
    head += ["all FLOPs ÷", "all FLOPs ÷ of all rollouts", "score + update time ÷"]
    rows = []
    for (objective, method), mine in by_method(runs).items():
        pairs = paired(runs, objective, method)
        fidelities = [run.fidelity for run in mine if run.fidelity is not None]
        rows.append(
            [
                f"{objective} {method}",
                ", ".join(map(str, sorted({run.steps for run in mine}))),
                str(len(mine)),
                interval([run.avg for run in mine]),
                interval([run.passed for run in mine]),
                interval([run.avg - plain.avg for plain, run in pairs]),
                interval([run.passed - plain.passed for plain, run in pairs]),
                f"{statistics.fmean(run.totals['rollouts/generated'] for run in mine):.0f}",
                f"{statistics.fmean(run.kept for run in mine):.0%}",
                f"{statistics.fmean(fidelities):.2f}" if fidelities else "",
                interval(ratios(pairs, lambda run: run.training, lambda run: run.training), 2),
                interval(ratios(pairs, lambda run: run.training, lambda run: run.whole), 2),
                interval(ratios(pairs, lambda run: run.flops, lambda run: run.flops), 2),
                interval(ratios(pairs, lambda run: run.flops, lambda run: run.whole_with_generation), 2),
                interval(ratios(pairs, lambda run: run.training_seconds, lambda run: run.training_seconds), 2),
            ]
        )
    return markdown(head, rows)


def cost_table(runs: list[Run]) -> str:
    """FLOPs and seconds of each phase, and what it took to reach plain training's final accuracy."""
    head = ["run", *(f"{phase} TFLOPs" for phase in PHASES), *(f"{clock} s" for clock in CLOCKS), "step s"]
    head += ["to plain's end: TFLOPs", "seconds", "reached by"]
    rows = []
    for (objective, method), mine in by_method(runs).items():
        plain = by_method(runs).get((objective, "plain"), [])
        row = [f"{objective} {method}"]
        row += [f"{statistics.fmean(run.totals[f'flops/{phase}'] for run in mine) / 1e12:.3f}" for phase in PHASES]
        row += [f"{statistics.fmean(run.seconds(clock) for run in mine):.1f}" for clock in (*CLOCKS, "step")]
        rows.append([*row, *_reached(mine, plain)])
    return markdown(head, rows)


def _reached(mine: list[Run], plain: list[Run]) -> list[str]:
    """Medians of what it took to the mean final accuracy of plain runs, over the runs that came there."""
    if not plain:
        return ["", "", ""]
    target = statistics.fmean(run.avg for run in plain)
    costs = [cost for run in mine if (cost := run.cost_to(target)) is not None]
    medians = ["", ""]
    if costs:
        flops, seconds = (statistics.median(part) for part in zip(*costs, strict=True))
        medians = [f"{flops / 1e12:.3f}", f"{seconds:.0f}"]
    return [*medians, f"{len(costs)} of {len(mine)}"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


NOTES = """\
± is half of a 95 % interval over seeds (Student's t); differences and ratios are paired by seed. ÷ is plain / method:
above 1 the method is cheaper. Training is old + reference + update. Plain training here already leaves out rollouts
whose advantage is 0, which changes no gradient; "÷ of all rollouts" compares with a trainer that does not. Fidelity is
the cosine between whole and kept gradient of a group, as sketches have it. FLOPs are computed, not timed; seconds are
of runs one after another, and say little on a machine that others use. "To plain's end" is what it took until an
evaluation reached the mean final avg@8 of the plain runs: medians over the runs that came there.
"""


def write_report(runs: list[Run], folder: Path) -> str:
    """Write methods.md and, where matplotlib is installed, methods.png into the runs' folder; return the tables."""
    text = f"{accuracy_table(runs)}\n\n{cost_table(runs)}\n\n{NOTES}"
    (folder / "methods.md").write_text(text, encoding="utf-8")
    plot(runs, folder / "methods.png")
    return text


def plot(runs: list[Run], path: Path) -> None:
    """Accuracy over training FLOPs, a panel per objective; bars are 95 % intervals."""
    if not importlib.util.find_spec("matplotlib"):
        print("no plot: pip install 'fastrl_fast[report]'")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    objectives = list(dict.fromkeys(run.objective for run in runs))
    figure, axes = pyplot.subplots(1, len(objectives), figsize=(5.5 * len(objectives), 4.5), squeeze=False)
    for axis, objective in zip(axes[0], objectives, strict=True):
        for (_, method), mine in by_method([run for run in runs if run.objective == objective]).items():
            accuracy = [run.avg for run in mine]
            cost = statistics.fmean(run.training for run in mine) / 1e12
            error = half(accuracy) if len(mine) > 1 else 0.0
            axis.errorbar(cost, statistics.fmean(accuracy), yerr=error, fmt="o", capsize=3, label=method)
        axis.set(title=objective, xlabel="training TFLOPs (old, reference, update)", ylabel="held-out avg@8")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
