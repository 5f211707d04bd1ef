"""What the FastRL paper (arXiv 2609.36932) reports of the jobs that our recipes geometry3k and geoqa8k set up."""

from dataclasses import dataclass

from .facts import accuracy_names, plain
from .run import Run

HEAD = (
    "held-out accuracy, %",
    "held-out pass@16, %",
    "other benchmarks, %",
    "their pass@16, %",
    "hours",
    "times faster",
    "seconds per step",
)

_GRPO, _CPPO, _GRESO, _FASTRL = "GRPO", "GRPO + CPPO", "GRPO + GRESO", "GRPO + FastRL"
PAPER: dict[str, dict[str, tuple[float | None, ...]]] = {
    "geometry3k": {
        _GRPO: (53.74, None, 51.32, 74.08, 29.72, 1.0, 534.96),
        _CPPO: (54.41, None, 51.68, None, 18.52, 1.6, None),
        _GRESO: (53.24, None, 50.25, None, 27.29, 1.09, None),
        _FASTRL: (55.9, None, 52.63, 77.23, 13.87, 2.14, 249.66),
        "DAPO": (53.57, None, 51.35, None, 28.08, 1.0, None),
        "DAPO + FastRL": (54.9, None, 53.08, None, 13.29, 2.11, None),
        "GSPO": (52.41, None, 49.5, None, 26.33, 1.0, None),
        "GSPO + FastRL": (54.57, None, 52.36, None, 12.84, 2.05, None),
    },
    "geoqa": {
        _GRPO: (68.3, None, 52.31, 73.07, 54.65, 1.0, 423.1),
        _CPPO: (68.03, None, 52.49, None, 39.22, 1.39, None),
        _GRESO: (68.7, None, 52.03, None, 48.33, 1.13, None),
        _FASTRL: (70.15, None, 53.59, 75.21, 25.65, 2.13, 198.58),
        "DAPO": (67.9, None, 51.23, None, 53.22, 1.0, None),
        "DAPO + FastRL": (70.29, None, 52.79, None, 24.62, 2.16, None),
        "GSPO": (66.97, None, 51.39, None, 52.87, 1.0, None),
        "GSPO + FastRL": (69.36, None, 52.48, None, 23.85, 2.22, None),
    },
}
"""By what the data's name holds, the rows of Qwen2.5-VL-7B, in the order of HEAD. One run each, without error bars, on
four H20; pass@16 and seconds are given for GRPO and FastRL alone."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The paper's rows and those of runs of the same job: (name, cells)."""

    head: tuple[str, ...]
    paper: list[tuple[str, list[str]]]
    runs: list[tuple[str, list[str]]]


def beside_paper(runs: list[Run]) -> Beside | None:
    """The table of the first run's job; none where the paper has no such job."""
    jobs = [next((job for job in PAPER if job in _data(run)), None) for run in runs]
    job = next((job for job in jobs if job), None)
    if job is None:
        return None
    paper = [(name, _texts(row)) for name, row in PAPER[job].items()]
    same = [run for run, own in zip(runs, jobs, strict=True) if own == job]
    return Beside(HEAD, paper, [(run.name, _texts(_row(run, same[0]))) for run in same])


def _data(run: Run) -> str:
    return str(run.settings.get("data", {}).get("path", "")).lower()


def _row(run: Run, first: Run) -> tuple[float | None, ...]:
    """Accuracy as it was measured last; the first run's seconds per step over this one's."""
    names = accuracy_names(run)
    mean = next((name for name in names if name.startswith("eval/avg")), None)
    own, theirs = _seconds(run), _seconds(first)
    faster = theirs / own if own and theirs else None
    hours = run.total("seconds/step") / 3600 if run.steps else None
    return (_percent(run, mean), _percent(run, "eval/pass@16"), None, None, hours, faster, own)


def _seconds(run: Run) -> float | None:
    return run.total("seconds/step") / len(run.steps) if run.steps else None


def _percent(run: Run, metric: str | None) -> float | None:
    values = run.points(metric)[1] if metric else []
    return 100 * values[-1] if values else None


def _texts(row: tuple[float | None, ...]) -> list[str]:
    return ["" if value is None else plain(value) for value in row]
