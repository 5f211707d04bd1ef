"""One fair timer for all benches: closeness first, then memory, then interleaved times.

python bench/packed_logprobs.py [--json FILE] [--threads N] [--only TEXT] [--repeats N]
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of one operator: who competes, and what must hold before anybody is timed."""

    name: str
    runs: dict[str, Run]
    """The first is ours; every call does the whole work and returns its results."""
    check: Callable[[dict[str, Any]], None]
    """Gets one result of each run and raises AssertionError where they are not close."""
    wanted: dict[str, float]
    """The least ratio of a run's time to ours that the project promises, by name of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of the timed calls, and the most memory one call held beyond what was there before, in megabytes."""

    median: float
    low: float
    high: float
    peak_mb: float


def measure(case: Case, *, repeats: int, budget: float = 60.0) -> dict[str, Timing]:
    """Check that the runs agree, then time them in turns.

    Each run is called once for its result (this is the warm-up too), once for its memory, and then all runs take
    turns, `repeats` times or until `budget` seconds are over, but at least three times.
    """
    case.check({name: run() for name, run in case.runs.items()})
    peaks = {name: peak_megabytes(run) for name, run in case.runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in case.runs}
    started = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - started > budget:
            break
        for name, run in case.runs.items():
            before = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - before)
    return {
        name: Timing(median=statistics.median(s), low=min(s), high=max(s), peak_mb=peaks[name])
        for name, s in seconds.items()
    }


def peak_megabytes(run: Run) -> float:
    """The kernel's own high-water mark of this process during one call, over its resident size before the call.

    The results of the call are part of it. Freed memory is handed back to the system first, or the call would find it
    ready and look smaller. NaN where /proc does not know a high-water mark.
    """
    try:
        before = reset_peak()
        result = run()
        peak = memory_mb("VmHWM")
        del result
    except OSError:
        return float("nan")
    return peak - before


def reset_peak() -> float:
    """Hand freed memory back to the system, forget the high-water mark, and return the resident megabytes."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def memory_mb(field: str) -> float:
    """VmRSS (resident now) or VmHWM (the most since `reset_peak`) of this process, in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def megabytes(*tensors: torch.Tensor) -> float:
    """What the tensors themselves hold: to be taken off a peak where only the extra memory counts."""
    return sum(x.numel() * x.element_size() for x in tensors) / 2**20


def main(description: str, cases: Callable[[], Iterable[Case]]) -> None:
    """Parse the command line, measure every case that it asks for, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    for case in cases():
        if options.only in case.name:
            timings = measure(case, repeats=options.repeats)
            _print(case, timings)
            records.append(
                {"case": case.name, "wanted": case.wanted, "runs": {n: asdict(t) for n, t in timings.items()}}
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(options.threads), "cases": records}, indent=1) + "\n")


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
    }


def _print(case: Case, timings: dict[str, Timing]) -> None:
    ours = next(iter(timings))
    print(f"{case.name}  (load {os.getloadavg()[0]:.1f})")
    for name, t in timings.items():
        ratio = t.median / timings[ours].median
        wanted = f"  wanted {case.wanted[name]:g}" if name in case.wanted else ""
        print(
            f"  {name:28} {t.median * 1e3:10.3f} ms  [{t.low * 1e3:.3f}, {t.high * 1e3:.3f}]  "
            f"{t.peak_mb:8.1f} MB  {ratio:6.2f} x{wanted}",
            flush=True,
        )
