"""`python -m fastrl_fast.report RUN [RUN ...] [--out PAGE.html] [--png FOLDER] [--watch]`: a page, and numbers.

The page is one file: it loads nothing and runs no script.
"""

import argparse
import importlib.util
import time
from pathlib import Path

from ..run_folder import PARTIAL, REPORT_FILE
from ..tables import build_console, print_line
from .page import render, write_pictures
from .run import Run, read_runs
from .terminal import show

WATCH_SECONDS = 10
"""Between two looks at runs that go on, and between two loads of the page."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="fastrl_fast.report", description="Show runs as one HTML page and in numbers."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument("--out", type=Path, help="page to write; by default report.html in the first run's folder")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write each chart as a .png")
    parser.add_argument("--watch", action="store_true", help="write the page anew while a run goes on")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("report: matplotlib is not installed; pip install 'fastrl_fast[report]'")
    out = args.out or args.runs[0] / REPORT_FILE
    runs = report(args.runs, out, refresh=args.watch)
    console = build_console()
    print_line(console, f"page: {out}")
    if args.watch:
        print_line(console, "written anew after each step until every run is finished; Ctrl-C ends that")
        runs = watch(runs, out)
    if args.png:
        write_pictures(runs, args.png)
    show(runs, console)
    return 0


def report(folders: list[Path], out: Path, *, refresh: bool = False) -> list[Run]:
    """Write the page of some runs and return them. Raises ValueError for a folder of no run, or a page that cannot be
    written."""
    runs = read_runs(folders)
    going_on = refresh and not all(run.finished for run in runs)
    text = render(runs, refresh=WATCH_SECONDS if going_on else None)
    beside = out.with_name(PARTIAL + out.name)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(out)
    except OSError as error:
        raise ValueError(f"--out: cannot write {out}: {error}") from error
    return runs


def watch(runs: list[Run], out: Path) -> list[Run]:
    """Write the page anew after each step until every run is finished; return the runs as they then are."""
    folders = [run.folder for run in runs]
    seen: list[int] = []
    while not all(run.finished for run in runs):
        time.sleep(WATCH_SECONDS)
        if (sizes := _sizes(folders)) != seen:
            seen, runs = sizes, report(folders, out, refresh=True)
    return runs


def _sizes(folders: list[Path]) -> list[int]:
    """What grows with each step and with the end of a run."""
    files = [folder / name for folder in folders for name in ("metrics.jsonl", "summary.json")]
    return [path.stat().st_size if path.is_file() else 0 for path in files]
