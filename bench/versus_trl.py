"""The same GRPO step by TRL's GRPOTrainer and by ours: whole, without sampling, and sampling alone.

    python -m bench.versus_trl [--quick] [--model 3.4M | 135M] [--kinds planned sampled] [--repeats N] [--threads N]
                               [--sides ours plugin] [--trl-batch N] [--json FILE]

Each side runs in a process of its own and waits while the other steps. Before anything is timed both take one step on
the same completions, and loss and gradient must agree. TRL always scores with its chunked fused head here; its Liger
kernels need Triton and so no CPU has them. Needs the extra `reference`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import timing

# isort: split
import torch

from .versus_job import small_job, smollm2_job

SIDES = {"ours": ("plain", "mdap", "lot"), "plugin": ("plain", "mdap"), "trl": ("plain",)}
"""Methods of each side; `lot` keeps 3 of 8 and stands for FastRL where random weights write texts all unlike."""
WANTED = {
    ("planned", "ours plain", "update"): 2.0,
    ("planned", "ours mdap", "update"): 4.0,
    ("planned", "plugin mdap", "update"): 1.8,
    ("sampled", "ours plain", "step"): 2.0,
    ("planned", "ours plain", "grown MB"): 2.0,
}
"""The least ratio of TRL's figure to ours that the project promises."""


class Side:
    """A process that steps when it is told to."""

    def __init__(self, name: str, job_file: Path, *, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRACKIO_DISABLED": "1"}
        self.errors = job_file.with_name(f"{name}.log")
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.versus_side", name, str(job_file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env,
            )  # fmt: skip

    def step(self, kind: str, method: str, *, check: bool = False) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout, "both are pipes"
        self.process.stdin.write(f"{kind} {method}{' check' if check else ''}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended early:\n{self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin, "it is a pipe"
        self.process.stdin.close()
        self.process.wait(timeout=60)


def check_agreement(sides: dict[str, Side]) -> None:
    """Take one step with all rollouts on every side and compare losses and clipped gradients with TRL's."""
    reports = {name: side.step("planned", "plain", check=True) for name, side in sides.items()}
    theirs = torch.load(reports["trl"]["gradient"])
    scale = torch.cat([g.flatten() for g in theirs.values()]).norm()
    for name, report in reports.items():
        mine = torch.load(report["gradient"])
        assert mine.keys() == theirs.keys(), f"{name} trains other parameters than TRL"
        gap = torch.cat([(mine[key] - theirs[key]).flatten() for key in theirs]).norm() / scale
        off = abs(report["loss"] - reports["trl"]["loss"])
        assert gap < 1e-4 and off < 1e-5, f"{name}: gradient differs by {gap:.1e} of its norm, loss by {off:.1e}"
        print(f"{name}: loss {report['loss']:.7f}, gradient within {gap:.1e} of TRL's", flush=True)


def measure(sides: dict[str, Side], *, kinds: list[str], repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by kind of step, side with method, and figure; all take turns."""
    runs = [(kind, name, method) for kind in kinds for name in sides for method in SIDES[name]]
    runs = [run for run in runs if run[::2] not in (("planned", "lot"), ("sampled", "mdap"))]
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {run: [] for run in runs}
    for turn in range(repeats + 1):
        for kind, name, method in runs:
            report = sides[name].step(kind, method)
            if turn > 0:  # the first is the warm-up
                found[kind, name, method].append(report)
    medians: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in kinds}
    figures = ("step", "update", "generation", "peak MB", "grown MB", "tokens", "kept")
    for (kind, name, method), reports in found.items():
        medians[kind][f"{name} {method}"] = {f: statistics.median(r[f] for r in reports) for f in figures}
    return medians


def table(medians: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = []
    for kind, rows in medians.items():
        theirs = rows["trl plain"]
        what = "planned completions, sampling left out" if kind == "planned" else "sampled completions"
        lines.append(f"{what}: seconds (ratio of TRL's to it)")
        for name, row in rows.items():
            cells = [
                f"{f} {row[f]:.3f} ({theirs[f] / row[f]:.2f})"
                for f in ("step", "update", "generation")
                if row[f] > 1e-3
            ]
            cells += [f"{f} {row[f]:.0f} ({theirs[f] / row[f]:.2f})" for f in ("peak MB", "grown MB")]
            lines.append(f"  {name:12} {'  '.join(cells)}  tokens {row['tokens']:.0f}  kept {row['kept']:.0f}")
    for (kind, name, figure), wanted in WANTED.items():
        if name in medians.get(kind, {}):
            ratio = medians[kind]["trl plain"][figure] / medians[kind][name][figure]
            lines.append(f"{kind}, {figure}: TRL / {name} {ratio:.2f} (wanted {wanted:g})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.versus_trl", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 prompts (135M: 1), 64 tokens at most, two turns")
    parser.add_argument("--model", choices=["3.4M", "135M"], default="3.4M")
    parser.add_argument("--kinds", nargs="+", choices=["planned", "sampled"], default=["planned", "sampled"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-batch", type=int, default=16, help="rows of TRL's micro-batches")
    parser.add_argument("--sides", nargs="*", choices=["ours", "plugin"], default=["ours", "plugin"])
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        parser.error("needs TRL: pip install 'fastrl_fast[reference]'")
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "3.4M":
            job = small_job(Path(folder), quick=options.quick, trl_batch=options.trl_batch)
        else:
            job = smollm2_job(Path(folder), quick=options.quick, trl_batch=options.trl_batch)
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(asdict(job)))
        sides = {name: Side(name, file, threads=options.threads) for name in (*options.sides, "trl")}
        try:
            check_agreement(sides)
            medians = measure(
                sides, kinds=options.kinds, repeats=min(2, options.repeats) if options.quick else options.repeats
            )
        finally:
            for side in sides.values():
                side.end()
    lines = table(medians)
    print(f"TRL {version('trl')}, micro-batches of {job.trl_batch} rows; load {os.getloadavg()[0]:.1f}")
    print("\n".join(lines))
    if options.json:
        sizes = {key: value for key, value in asdict(job).items() if key not in ("model", "folder")}
        record = {"machine": timing.machine("cpu", options.threads), "trl": version("trl"), "model": options.model}
        options.json.write_text(
            json.dumps(record | {"job": sizes, "medians": medians, "lines": lines}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
