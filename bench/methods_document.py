"""docs/methods.md: the tables of every setting that has finished runs, with where and when they were made."""

import os
import platform
import re
import subprocess
from pathlib import Path

from .methods_report import NOTES, accuracy_table, cost_table, plot
from .methods_runs import Run

TITLES = {
    "demo": "The default CPU task",
    "smollm2": "SmolLM2-135M on sums",
}
COMMANDS = {"demo": "python -m bench.methods", "smollm2": "python -m bench.methods --setting smollm2"}


def write_document(runs: dict[str, list[Run]], path: Path, commit: str | None) -> str:
    """Write the document, and a plot per setting beside it; return its text. Raises ValueError without any run."""
    parts = ["# Methods, compared over seeds\n", NOTES]
    for setting, mine in runs.items():
        if mine:
            picture = path.with_name(f"{path.stem}_{setting}.png")
            plot(mine, picture)
            parts += [section(setting, mine, commit or head(), picture.name)]
    if len(parts) == 2:
        raise ValueError("bench.methods --document: no finished runs were found; give their folder with --out")
    text = "\n".join(parts)
    path.write_text(text, encoding="utf-8")
    return text


def section(setting: str, runs: list[Run], commit: str, picture: str) -> str:
    seeds = sorted({run.seed for run in runs})
    steps = sorted({run.steps for run in runs})
    dates = sorted({run.finished for run in runs})
    made = f"{dates[0]}" if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"""## {TITLES[setting]}

`{COMMANDS[setting]}`, seeds {", ".join(map(str, seeds))}, {", ".join(map(str, steps))} steps, {made}, commit {commit},
{machine()}.

{accuracy_table(runs)}

{cost_table(runs)}

![accuracy over training FLOPs]({picture})
"""


def machine() -> str:
    """Processor, cores, Python and torch."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    processor = named[1] if named else platform.machine()
    return f"{os.cpu_count()} cores of {processor}, Python {platform.python_version()}, torch {torch.__version__}"


def head() -> str:
    """The checkout's commit, or "unknown" outside of one."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
