"""What a run came to, in numbers with a name and a way to write them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from .. import metrics
from .run import Run

SPENT = ("flops/generation", "flops/old", "flops/reference", "flops/update")
SAVED = ("flops_saved/old", "flops_saved/reference", "flops_saved/update")
SHARED = ("flops_shared/old", "flops_shared/reference", "flops_shared/update")
ENDS = 10
"""Steps whose mean stands for the start and the end of a run, or half of them where there are fewer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A number about a run; `value` is none where the run has not got it."""

    label: str
    value: float | None
    text: str


def share(value: float) -> str:
    return f"{value:.1%}"


def plain(value: float) -> str:
    """Four digits, and whole numbers as they are."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1e5 else f"{value:.4g}"


def flops(value: float) -> str:
    """With the prefix that leaves one to three digits before the point."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}FLOP"
        value /= 1000
    return f"{value:.3g} ZFLOP"


def seconds(value: float) -> str:
    minutes, hours = value / 60, value / 3600
    return f"{hours:.2f} h" if hours >= 1 else f"{minutes:.1f} min" if minutes >= 2 else f"{value:.3g} s"


def facts(run: Run) -> list[Fact]:
    """Everything that is said of a run as one number, in the order of a step; labels depend on the run's metrics."""
    table: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("steps", run.last_step, plain),
        *_ends(run, "reward", "reward/mean"),
        *_accuracy(run),
        ("rollouts sampled", total(run, "rollouts/generated"), plain),
        ("rollouts trained on", total(run, "rollouts/kept"), plain),
        ("kept fraction", ratio(run, "rollouts/kept", "rollouts/generated"), share),
        *_dropped(run),
        ("dead groups", ratio(run, "groups/dead", "groups/count"), share),
        ("group size, rollouts", ratio(run, "rollouts/generated", "groups/count"), plain),
        ("kept of a group, rollouts", mean(run, "groups/effective_size"), plain),
        ("fidelity, cosine", mean(run, "prune/fidelity"), plain),
        *_ends(run, "entropy in nats", "policy/entropy"),
        ("KL to the reference in nats", mean(run, "policy/kl"), plain),
        ("clipped below", mean(run, "policy/clipped_low"), share),
        ("clipped above", mean(run, "policy/clipped_high"), share),
        ("sampler gap in nats", mean(run, "policy/sampler_gap"), plain),
        *_ends(run, "completion tokens", "completion/length"),
        ("truncated", mean(run, "completion/truncated_fraction"), share),
        ("tokens sampled", total(run, "tokens/generated"), plain),
        ("tokens trained", total(run, "tokens/trained"), plain),
        ("FLOPs spent", total(run, *SPENT), flops),
        ("FLOPs saved by pruning", total(run, *SAVED), flops),
        ("FLOPs saved by the budget", total(run, "flops_saved/generation"), flops),
        ("FLOPs saved by shared prompts", total(run, *SHARED), flops),
        ("time of all steps", total(run, "seconds/step"), seconds),
        *((f"time: {name}", total(run, f"seconds/{name}"), seconds) for name in metrics.PHASES),
        ("time saved, estimated", total(run, *run.names("seconds_saved/")), seconds),
        ("updates skipped", total(run, "optimizer/skipped"), plain),
    ]
    return [Fact(label, value, "" if value is None else form(value)) for label, value, form in table]


def side_by_side(runs: list[Run]) -> list[tuple[str, list[Fact | None]]]:
    """One row per label that any run has a value for, a cell per run."""
    columns = [{fact.label: fact for fact in facts(run)} for run in runs]
    rows = [(label, [column.get(label) for column in columns]) for label in merged([list(c) for c in columns])]
    return [(label, cells) for label, cells in rows if any(fact and fact.value is not None for fact in cells)]


def merged(orders: list[list[str]]) -> list[str]:
    """The names of all lists, each after the one before it in its own list."""
    names: list[str] = []
    for order in orders:
        place = 0
        for name in order:
            if name in names:
                place = names.index(name)
            else:
                names.insert(place, name)
            place += 1
    return names


def total(run: Run, *names: str) -> float | None:
    """Sum over the steps; none where no step has any of the metrics."""
    return run.total(*names) if any(name in step for step in run.steps for name in names) else None


def ratio(run: Run, above: str, below: str) -> float | None:
    """Quotient of two totals."""
    return run.total(above) / whole if (whole := run.total(below)) else None


def mean(run: Run, metric: str) -> float | None:
    """Mean over the steps that have the metric."""
    return sum(values) / len(values) if (values := run.points(metric)[1]) else None


def alarms(run: Run) -> list[tuple[str, int, int]]:
    """(name, first step, number of steps) of each alarm that held."""
    found = []
    for name in run.names("alarm/"):
        if steps := [int(step["step"]) for step in run.steps if step.get(name)]:
            found.append((name.removeprefix("alarm/").replace("_", " "), steps[0], len(steps)))
    return found


def _ends(run: Run, label: str, metric: str) -> list[tuple[str, float | None, Callable[[float], str]]]:
    values = run.points(metric)[1]
    count = min(ENDS, (len(values) + 1) // 2)
    first, last = (sum(part) / count if count else None for part in (values[:count], values[-count:]))
    return [(f"{label}, start", first, plain), (f"{label}, end", last, plain)]


def _accuracy(run: Run) -> list[tuple[str, float | None, Callable[[float], str]]]:
    rows: list[tuple[str, float | None, Callable[[float], str]]] = []
    for name in accuracy_names(run):
        steps, values = run.points(name)
        label = f"held-out {name.removeprefix('eval/')}"
        rows.append((f"{label}, before", values[0] if steps[0] == 0 else None, plain))
        rows.append((f"{label}, latest", values[-1] if steps[-1] > 0 else None, plain))
    return rows


def accuracy_names(run: Run) -> list[str]:
    """avg@k and pass@k as metrics, also where only the summary has them."""
    before = [f"eval/{name}" for name in run.summary.get("before", {})]
    names = dict.fromkeys([*before, *run.names("eval/")])
    return [name for name in names if name.startswith(("eval/avg", "eval/pass"))]


def _dropped(run: Run) -> list[tuple[str, float | None, Callable[[float], str]]]:
    totals = {name: run.total(name) for name in run.names("dropped/")}
    return [
        (f"dropped: {name.removeprefix('dropped/').replace('_', ' ')}", total, plain)
        for name, total in totals.items()
        if total
    ]
