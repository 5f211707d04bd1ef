"""One fair timer for all benches: closeness first, then memory, then interleaved times.

python bench/packed_logprobs.py [--json FILE] [--device cuda] [--quick] [--threads N] [--only TEXT] [--repeats N]
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a bench runs, and how large."""

    device: str = "cpu"
    quick: bool = False
    """Sizes so small that only whether it runs is seen."""

    @property
    def on_gpu(self) -> bool:
        """Whether the sizes of a GPU are wanted."""
        return self.device == "cuda" and not self.quick


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of one operator: who competes, and what must hold before anybody is timed."""

    name: str
    runs: dict[str, Run]
    """The first is ours; every call does the whole work and returns its results."""
    check: Callable[[dict[str, Any]], None]
    """Gets one result of each run and raises AssertionError where they are not close."""
    wanted: dict[str, float]
    """The least ratio of a run's time to ours that the project wants, by name of the run."""
    bytes: float = 0
    """What ours must read and write in memory, where that is what bounds it; 0 elsewhere."""
    floor: str = ""
    """The run that is nothing but the products inside ours: no way to do the rest can be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of the timed calls, and the most memory one call held beyond what was there before, in megabytes."""

    median: float
    low: float
    high: float
    peak_mb: float
    results_mb: float
    """What of that the tensors were that the call returned."""


def measure(case: Case, *, device: str, repeats: int, budget: float = 60.0) -> dict[str, Timing]:
    """Check that the runs agree, then time them in turns: on a GPU between two of its events.

    Each run is called once for its result (this is the warm-up too), once for its memory, and then all runs take
    turns, `repeats` times or until `budget` seconds are over, but at least three times; every second turn is in reverse
    order, as a run takes longer after a larger one, which left its memory to the system. A baseline that cannot run
    here is named and left out.
    """
    results = _results(case)
    case = replace(case, runs={name: case.runs[name] for name in results})
    case.check(results)
    sizes = {name: _megabytes(result) for name, result in results.items()}
    del results
    peak, seconds_of = (_gpu_peak_megabytes, _gpu_seconds) if device == "cuda" else (peak_megabytes, _seconds)
    peaks = {name: peak(run) for name, run in case.runs.items()}
    next(iter(case.runs.values()))()  # the next call takes its memory from the system again: up to a fifth longer
    seconds: dict[str, list[float]] = {name: [] for name in case.runs}
    started = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - started > budget:
            break
        for name, run in list(case.runs.items())[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(seconds_of(run))
    return {
        name: Timing(median=statistics.median(s), low=min(s), high=max(s), peak_mb=peaks[name], results_mb=sizes[name])
        for name, s in seconds.items()
    }


def _results(case: Case) -> dict[str, Any]:
    results, ours = {}, next(iter(case.runs))
    for name, run in case.runs.items():
        try:
            results[name] = run()
        except Exception as error:  # a compiler, a library or memory that is not there: the others are worth measuring
            if name == ours:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{case.name}: {name} cannot run: {reason[:200]}", flush=True)
    return results


def _megabytes(result: Any) -> float:
    tensors = result if isinstance(result, tuple) else (result,)
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor)) / 2**20


def _seconds(run: Run) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def _gpu_seconds(run: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _gpu_peak_megabytes(run: Run) -> float:
    """The allocator's high-water mark during one call over what was there before; the results are part of it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return (peak - before) / 2**20


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


def compiled(function: Callable[..., Any], setting: Setting) -> dict[str, Callable[..., Any]]:
    """`function` under torch.compile as a further baseline, by its name; nothing where quick: compiling takes long."""
    return {} if setting.quick else {"torch.compile": torch.compile(function, dynamic=False)}


def main(description: str, cases: Callable[[Setting], Iterable[Case]]) -> None:
    """Parse the command line, measure every case that it asks for, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda also takes a GPU's sizes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two repeats: does it run at all")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    failed = []
    for case in cases(Setting(options.device, options.quick)):
        if options.only not in case.name:
            continue
        case = replace(case, wanted={}) if options.quick else case
        try:
            timings = measure(case, device=options.device, repeats=2 if options.quick else options.repeats)
        except Exception:
            traceback.print_exc()
            failed.append(case.name)
            continue
        print(table(case, timings), flush=True)
        runs = {name: asdict(timing) for name, timing in timings.items()}
        fields = {"wanted": case.wanted, "bytes": case.bytes, "floor": case.floor}
        records.append({"case": case.name, **fields, "runs": runs})
        if options.json:  # after every case: a time limit may end this process
            record = {"machine": machine(options.device, options.threads), "cases": records}
            partial = options.json.with_suffix(".partial")
            partial.write_text(json.dumps(record, indent=1) + "\n")
            partial.replace(options.json)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def machine(device: str, threads: int) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cuda": torch.version.cuda,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
    }


def table(case: Case, timings: dict[str, Timing]) -> str:
    """A line per run; ratios are their time / ours, above 1 is slower than ours."""
    ours = next(iter(timings.values())).median
    lines = [f"{case.name}  (load {os.getloadavg()[0]:.1f})"]
    for name, t in timings.items():
        wanted = f"  wanted {case.wanted[name]:g}" if name in case.wanted else ""
        lines.append(
            f"  {name:28} {t.median * 1e3:10.3f} ms  [{t.low * 1e3:.3f}, {t.high * 1e3:.3f}]  "
            f"{t.peak_mb:8.1f} MB ({t.results_mb:.1f} results)  {t.median / ours:6.2f} x{wanted}"
        )
    if case.floor in timings:
        lines.append(f"  {bound(case.floor, case.wanted, {name: t.median for name, t in timings.items()})}")
    return "\n".join(lines)


def bound(floor: str, wanted: dict[str, float], medians: dict[str, float]) -> str:
    """What ours is made of, and the ratios that it would have if everything but its products took no time."""
    ours, products = next(iter(medians.values())), medians[floor]
    best = [f"{name} {medians[name] / products:.2f} x" for name in wanted if name in medians]
    parts = f"ours = products {products * 1e3:.3f} ms ({products / ours:.0%}) + rest {(ours - products) * 1e3:.3f} ms"
    return parts + (f"; without the rest: {', '.join(best)}" if best else "")
