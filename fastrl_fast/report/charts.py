"""The pictures of a report: which there are, and how each is drawn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..metrics import PHASES
from .facts import SAVED, SHARED, SPENT, accuracy_names
from .run import Run

SMOOTHED_FROM = 50
"""Steps from which on a line is a running mean, with the steps themselves faint behind it."""
WINDOWS = 25
"""Windows of the running mean in a run."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line or layer: a metric, divided by another where `per` is given."""

    label: str
    metric: str
    per: str | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture over steps. `kind`: lines, points (few, far between), or layers that add up, a panel per run; `unit`:
    of shares, which start at 0, or of numbers with a prefix."""

    name: str
    title: str
    note: str
    series: Callable[[Run], list[Series]]
    kind: str = "lines"
    unit: str = ""


def _these(*series: Series) -> Callable[[Run], list[Series]]:
    return lambda run: list(series)


def _one(metric: str, per: str | None = None) -> Callable[[Run], list[Series]]:
    return _these(Series("", metric, per))


def _section(section: str, *leave_out: str) -> Callable[[Run], list[Series]]:
    def series(run: Run) -> list[Series]:
        names = [name for name in run.names(section) if name not in leave_out]
        return [Series(name.removeprefix(section).replace("_", " "), name) for name in names]

    return series


def _accuracy(run: Run) -> list[Series]:
    """avg@k and the pass@k of the largest k."""
    names = accuracy_names(run)
    return [Series(name.removeprefix("eval/"), name) for name in dict.fromkeys([*names[:1], *names[-1:]])]


def _layers(*metrics: str, prefix: str = "") -> list[Series]:
    return [Series(prefix + metric.partition("/")[2], metric) for metric in metrics]


CHARTS = (
    Chart("reward", "Reward", "Mean over the step's graded rollouts.", _one("reward/mean")),
    Chart(
        "accuracy",
        "Held-out accuracy",
        "Before, during and after training; the largest k of pass@k.",
        _accuracy,
        kind="points",
    ),
    Chart(
        "reward_terms",
        "Reward by function",
        "Each reward function's mean, before its weight.",
        _section("reward/", "reward/mean", "reward/std"),
    ),
    Chart(
        "kept",
        "Rollouts trained on",
        "Share of the sampled rollouts that cost a forward and backward pass.",
        _one("rollouts/kept_fraction"),
        unit="%",
    ),
    Chart(
        "dropped",
        "Why rollouts were dropped",
        "Rollouts per step by reason; those trained on at the bottom.",
        lambda run: [Series("kept", "rollouts/kept"), *_section("dropped/")(run)],
        kind="layers",
    ),
    Chart(
        "group_size",
        "Group sizes",
        "Rollouts per prompt: sampled, and trained on in groups that were trained on at all.",
        _these(Series("sampled", "rollouts/generated", "groups/count"), Series("trained on", "groups/effective_size")),
    ),
    Chart(
        "dead",
        "Dead groups",
        "Share of groups whose rewards are all equal.",
        _one("groups/dead", "groups/count"),
        unit="%",
    ),
    Chart(
        "fidelity",
        "Fidelity of pruning",
        "Cosine between the gradient sketch of all rollouts and that of the kept ones.",
        _one("prune/fidelity"),
    ),
    Chart("entropy", "Entropy", "Of the policy, per trained token, in nats.", _one("policy/entropy")),
    Chart("kl", "KL to the reference", "Per trained token, as the loss estimates it, in nats.", _one("policy/kl")),
    Chart(
        "clipped",
        "Clipped tokens",
        "Share of trained tokens whose ratio is outside the bounds against their advantage.",
        _these(Series("below", "policy/clipped_low"), Series("above", "policy/clipped_high")),
        unit="%",
    ),
    Chart(
        "sampler_gap",
        "Sampler gap",
        "Mean |logprob - rollout_logprob| of a token in nats; after a step's first update not 0 by right.",
        _one("policy/sampler_gap"),
    ),
    Chart(
        "importance",
        "Importance weights",
        "Mean weight between sampler and trainer, and share of trained tokens whose weight was cut or masked.",
        _these(Series("mean", "policy/importance"), Series("cut", "policy/importance_cut")),
    ),
    Chart("length", "Completion length", "Mean tokens of a completion.", _one("completion/length")),
    Chart(
        "truncated",
        "Truncated completions",
        "Share cut at rollout.max_completion_tokens.",
        _one("completion/truncated_fraction"),
        unit="%",
    ),
    Chart(
        "tokens",
        "Tokens",
        "Completion tokens per step.",
        _these(Series("sampled", "tokens/generated"), Series("trained on", "tokens/trained")),
    ),
    Chart("grad_norm", "Gradient norm", "Before clipping, mean of the step's updates.", _one("optimizer/grad_norm")),
    Chart(
        "seconds",
        "Time per phase",
        "Seconds per step.",
        lambda run: _layers(*(f"seconds/{phase}" for phase in PHASES)),
        kind="layers",
    ),
    Chart(
        "flops",
        "FLOPs spent and saved",
        "Per step, computed from lengths and shapes; saved is what dropped rollouts and prompts not shared would cost.",
        lambda run: [
            *_layers(*SPENT),
            *_layers(*SHARED, prefix="saved by sharing: "),
            *_layers(*SAVED, prefix="saved by pruning: "),
        ],
        kind="layers",
        unit="FLOP",
    ),
)


def draw(chart: Chart, runs: list[Run]) -> Any | None:
    """The chart as a matplotlib figure, None where no run has what it shows.

    Names come from folders and files: nothing in them is taken for mathematics.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if not any(series for run in runs for series in _present(chart, run)):
        return None
    panels: list[list[Run]] = [[run] for run in runs] if chart.kind == "layers" else [runs]
    columns, rows = min(len(panels), 2), -(-len(panels) // 2)
    with matplotlib.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4 * columns, 3.0 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for axis, shown in zip(axes, panels, strict=False):
            if chart.kind == "layers":
                _stack(axis, chart, shown[0], title=shown[0].name if len(runs) > 1 else "")
            else:
                _lines(axis, chart, shown)
            _axes(axis, chart)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
    return figure


def _axes(axis: Any, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.grid(alpha=0.25)
    axis.set_xlabel("step")
    axis.margins(x=0.01)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if chart.unit == "%":
        top = max(axis.get_ylim()[1], 0.01)
        axis.set_ylim(bottom=-top / 50, top=top)  # a line of zeros is seen above the axis
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    elif chart.unit:
        axis.yaxis.set_major_formatter(EngFormatter(chart.unit))


def _present(chart: Chart, run: Run) -> Iterator[tuple[Series, list[float], list[float]]]:
    """The chart's series that the run has, with their points; of layers those that are not 0 throughout."""
    for series in chart.series(run):
        steps, values = run.points(series.metric, per=series.per)
        if values and (chart.kind != "layers" or any(values)):
            yield series, steps, values


def _lines(axis: Any, chart: Chart, runs: list[Run]) -> None:
    """A colour per run and a dash per series, or a colour per series of a single run."""
    dashes = ("-", "--", ":", "-.")
    marker = "o" if chart.kind == "points" else ""
    labels = []
    for number, run in enumerate(runs):
        for place, (series, steps, values) in enumerate(_present(chart, run)):
            colour = f"C{number if len(runs) > 1 else place}"
            style = dashes[place % len(dashes)] if len(runs) > 1 else "-"
            if chart.kind == "lines" and len(values) >= SMOOTHED_FROM:
                axis.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
                values = running_mean(values, len(values) // WINDOWS)
            alone = "." if len(values) == 1 else marker
            (line,) = axis.plot(steps, values, style, color=colour, marker=alone, markersize=4)
            label = " ".join(part for part in (run.name if len(runs) > 1 else "", series.label) if part)
            labels.append((line, label))
    _legend(axis, labels)


def _stack(axis: Any, chart: Chart, run: Run, *, title: str) -> None:
    """Layers that add up, of the same colour in every run; what was saved is hatched, as it was not spent."""
    steps = [step["step"] for step in run.steps]
    floor = [0.0] * len(steps)
    labels = []
    places = {series.metric: place for place, series in enumerate(chart.series(run))}
    for series, _, _ in _present(chart, run):
        colour = _colour(places[series.metric])
        top = [low + step.get(series.metric, 0.0) for low, step in zip(floor, run.steps, strict=True)]
        saved = series.label.startswith("saved")
        style = {"facecolor": "none", "hatch": "///"} if saved else {"facecolor": colour}
        layer = axis.fill_between(steps, floor, top, step="mid", edgecolor=colour, linewidth=0.5, **style)
        labels.append((layer, series.label))
        floor = top
    axis.set_ylim(bottom=0)
    if title:
        axis.set_title(shortened(title), fontsize=9)
    _legend(axis, labels[::-1])


def _colour(place: int) -> Any:
    """matplotlib's ten, and from place 10 on their light ones: there are more drop reasons than ten."""
    import matplotlib

    return matplotlib.colormaps["tab20"](2 * place % 20 + place // 10)


def _legend(axis: Any, labels: list[tuple[Any, str]]) -> None:
    # matplotlib leaves out labels that begin with an underscore.
    named = [(handle, f" {shortened(label)}") for handle, label in labels if label]
    if named:
        handles, texts = zip(*named, strict=True)
        axis.legend(handles, texts, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def shortened(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` in all, fewer at the beginning."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(end - window, 0) : end]
        means.append(sum(part) / len(part))
    return means
