"""The report as one HTML page without scripts that loads nothing: tables, pictures inside it, and rollouts to read."""

import base64
import io
from collections.abc import Iterable
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from ..tables import visible
from .charts import CHARTS, SMOOTHED_FROM, draw
from .comparison import compare
from .facts import ENDS, alarms, merged, plain, side_by_side
from .paper import beside_paper
from .run import Run
from .sample import Sample, read_samples

TEXT_LIMIT = 4000
"""Characters of a prompt or completion that are shown."""
ROLLOUT_LIMIT = 16
"""Rollouts of a sampled group that are shown."""


def render(runs: list[Run], *, refresh: int | None = None) -> str:
    """The page. `refresh`: seconds after which a browser loads it again.

    Everything that comes from a run is escaped by the template; a content policy forbids scripts and every address
    besides. Needs matplotlib.
    """
    samples = [_samples(run) for run in runs]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"visible": visible, "brief": brief, "number": number}
    template = environment.from_string((resources.files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        written=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        refresh=refresh,
        alarms=[alarms(run) for run in runs],
        facts=side_by_side(runs),
        ends=ENDS,
        comparison=compare(runs),
        beside=beside_paper(runs),
        charts=[(chart, _image(figure), figure.get_figwidth() > 7) for chart, figure in _figures(runs)],
        smoothed_from=SMOOTHED_FROM,
        samples=samples,
        text_limit=TEXT_LIMIT,
        rollout_limit=ROLLOUT_LIMIT,
        last=_last(runs),
        yaml=[yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True) for run in runs],
    )


def write_pictures(runs: list[Run], folder: Path) -> None:
    """Each chart as a .png."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart, figure in _figures(runs):
        figure.savefig(folder / f"{chart.name}.png", dpi=120)


def brief(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most} characters more"


def number(value: Any) -> str:
    return plain(value) if isinstance(value, (int, float)) else "none" if value is None else str(value)


def _figures(runs: list[Run]) -> Iterable[tuple[Any, Any]]:
    for chart in CHARTS:
        if (figure := draw(chart, runs)) is not None:
            yield chart, figure


def _image(figure: Any) -> str:
    """As a data address: a picture of its own, whose names and styles cannot meet those of another."""
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def _samples(run: Run) -> list[Sample]:
    return read_samples(run.folder / "rollouts.jsonl", run.notes)


def _last(runs: list[Run]) -> list[tuple[str, list[float | None]]]:
    """Every metric of each run's last step."""
    steps = [run.steps[-1] if run.steps else {} for run in runs]
    return [(name, [step.get(name) for step in steps]) for name in merged([list(step) for step in steps])]
