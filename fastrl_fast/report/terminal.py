"""The report in a terminal: coloured tables, and plain columns where the output is a pipe or a file."""

from itertools import pairwise

from rich.console import Console

from ..tables import print_line, print_table
from .comparison import Comparison, compare
from .facts import alarms, side_by_side
from .run import Run

BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 32
TRENDS = ("reward/mean", "rollouts/kept_fraction", "policy/entropy", "completion/length", "seconds/step")


def show(runs: list[Run], console: Console) -> None:
    """Print what the page says in numbers; names come from folders, so nothing in them is taken for markup."""
    for run in runs:
        print_line(console, f"{run.name}: {run.state}", "bold")
        for note in run.notes:
            print_line(console, f"  {note}", "yellow")
        for name, first, count in alarms(run):
            print_line(console, f"  alarm {name}: first in step {first}, in {count} steps", "bold red")
    rows = [[label, *(fact.text if fact else "" for fact in cells)] for label, cells in side_by_side(runs)]
    print_table(console, ["", *(run.name for run in runs)], rows)
    if comparison := compare(runs):
        _compare(console, comparison)
    if console.is_terminal:
        values = {(name, run.name): run.points(name)[1] for name in TRENDS for run in runs}
        print_table(console, ["trend", "", ""], [[*names, sparkline(v)] for names, v in values.items() if len(v) > 1])


def sparkline(values: list[float], width: int = TREND_WIDTH) -> str:
    """The values as bars from their lowest to their highest, means of neighbours where there are more than `width`."""
    count = min(width, len(values))
    borders = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5)] if span else BARS[0] for mean in means)


def _compare(console: Console, comparison: Comparison) -> None:
    print_line(
        console, f"over the first {comparison.steps} steps; in brackets costs first / this, accuracy this / first"
    )
    cells = [[text if r is None else f"{text} ({r:.2f}×)" for text, r in row.cells] for row in comparison.rows]
    columns = [[head, *(line[place] for line in cells)] for place, head in enumerate(comparison.head)]
    print_table(console, ["", *(row.name for row in comparison.rows)], columns)
