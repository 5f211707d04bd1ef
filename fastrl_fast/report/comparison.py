"""Several runs over the steps that all of them have, as ratios to the first."""

from dataclasses import dataclass

from .facts import SPENT, accuracy_names, flops, plain, seconds
from .run import Run


@dataclass(frozen=True, slots=True)
class Row:
    """One run beside the first: (text, ratio) of each measure; a ratio of costs is first / this, so above 1 is
    cheaper."""

    name: str
    cells: list[tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`steps` is the number of steps that every run has."""

    steps: int
    head: list[str]
    rows: list[Row]


def compare(runs: list[Run]) -> Comparison | None:
    """Cost and accuracy of at least two runs over their common steps; none where one of them has no step."""
    steps = min((run.last_step for run in runs), default=0)
    if len(runs) < 2 or steps == 0:
        return None
    costs = [
        ("time of steps", ("seconds/step",), seconds),
        ("time of score and update", ("seconds/score", "seconds/update"), seconds),
        ("FLOPs", SPENT, flops),
        ("FLOPs of training", SPENT[1:], flops),
        ("tokens sampled", ("tokens/generated",), plain),
        ("tokens trained", ("tokens/trained",), plain),
    ]
    measured = [name for name in accuracy_names(runs[0]) if all(name in accuracy_names(run) for run in runs)]
    head = [name for name, _, _ in costs] + [f"held-out {name.removeprefix('eval/')}" for name in measured]
    rows = []
    for run in runs:
        beside_first = run is not runs[0]
        cells: list[tuple[str, float | None]] = []
        for _, metrics, form in costs:
            cost, first = run.total(*metrics, until=steps), runs[0].total(*metrics, until=steps)
            cells.append((form(cost), first / cost if cost and beside_first else None))
        for name in measured:
            value, base = _latest(run, name, steps), _latest(runs[0], name, steps)
            ratio = value / base if value is not None and base and beside_first else None
            cells.append(("" if value is None else plain(value), ratio))
        rows.append(Row(run.name, cells))
    return Comparison(steps, head, rows)


def _latest(run: Run, metric: str, until: int) -> float | None:
    """The last measurement after training began and up to step `until`."""
    values = [value for step, value in zip(*run.points(metric), strict=True) if 0 < step <= until]
    return values[-1] if values else None
