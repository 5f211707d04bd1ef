"""What a profile says, as a table: where the time of a step went, and how near each part came to the machine's limits.

    python profiles/summarize.py FILE [--limits FILE.json] [--gflops N --gbs N] [--top N] [--json FILE]

FILE is a trace of torch's profiler (step-N.json.gz, from --log.profile_steps), or a csv of profiles/ncu_kernel.sh or
profiles/nsys_step.sh. The limits of the machine come from `python bench/limits.py --json FILE.json`, or by hand. With
intensity I = FLOP / byte, the roof is min(gflops, I x gbs) and `of the roof` what was reached of it. From a trace,
FLOPs are those of matrix products and attention, counted by shapes, and bytes what an operator must read at least; from
ncu both are counted by the GPU. nsys has times alone.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from trace_events import Row, read_trace

NCU_TIME, NCU_BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
NCU_FLOPS = {
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": 1.0,
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": 1.0,
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 2.0,
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum": 1.0,
}
"""Counters of ncu and the operations that each counts for."""


def read(path: Path) -> list[Row]:
    """Rows of any file that it can read, by its content. Raises ValueError for another one."""
    if path.name.endswith((".json", ".json.gz")):
        return read_trace(path)
    with path.open(newline="") as file:
        lines = [line for line in file if not line.startswith("==")]
    table = list(csv.DictReader(lines))
    if table and NCU_TIME in table[0]:
        return read_ncu(table)
    if table and {"Total Time (ns)", "Instances"} <= table[0].keys():
        return read_nsys(table)
    raise ValueError(f"{path} is neither a trace of torch's profiler nor a csv of ncu --page raw or nsys stats")


def read_ncu(table: list[dict[str, str]]) -> list[Row]:
    """A row per kernel; the first line under the names holds units, which --print-units base keeps at ns and byte."""
    units, *launches = table
    wanted = {NCU_TIME: ("ns", "nsecond"), NCU_BYTES: ("byte",)}
    for name, allowed in wanted.items():
        if units[name] not in allowed:
            raise ValueError(f"{name} must be in {allowed[0]} (ncu --print-units base), got {units[name]!r}")
    rows: dict[str, Row] = {}
    for launch in launches:
        row = rows.setdefault(launch["Kernel Name"], Row("", launch["Kernel Name"]))
        row.calls += 1
        row.seconds += _number(launch[NCU_TIME]) * 1e-9
        row.bytes += _number(launch[NCU_BYTES])
        row.flops += sum(times * _number(launch[name]) for name, times in NCU_FLOPS.items() if launch.get(name))
    return list(rows.values())


def read_nsys(table: list[dict[str, str]]) -> list[Row]:
    """A row per kernel (cuda_gpu_kern_sum) or range (nvtx_sum); these contain each other, so they add up to more."""
    name = "Range" if "Range" in table[0] else "Name"
    return [
        Row("", line[name].removeprefix(":"), int(_number(line["Instances"])), _number(line["Total Time (ns)"]) * 1e-9)
        for line in table
    ]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def read_limits(path: Path) -> tuple[float, float]:
    """GFLOP/s and GB/s of bench/limits.py: its fastest matrix product and its copy."""
    gflops = gbs = 0.0
    for case in json.loads(path.read_text())["cases"]:
        (timing,) = case["runs"].values()
        if case["case"].startswith("gemm"):
            t, h, v = map(int, case["case"].split()[1:])
            gflops = max(gflops, 2e-9 * t * h * v / timing["median"])
        elif case["case"] == "copy":
            gbs = case["bytes"] * 1e-9 / timing["median"]
    return gflops, gbs


def table(rows: list[Row], *, top: int, gflops: float = 0.0, gbs: float = 0.0) -> str:
    """Markdown: the `top` rows by time and the sum of the rest."""
    rows = sorted(rows, key=lambda row: -row.seconds)
    total = sum(row.seconds for row in rows) or 1.0
    if rest := rows[top:]:
        rows = rows[:top] + [Row("", f"{len(rest)} more", sum(r.calls for r in rest), sum(r.seconds for r in rest))]
    head = ["phase", "what", "calls", "ms", "share", "GFLOP/s", "GB/s", "FLOP/byte", "of the roof"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [row.phase, row.name, str(row.calls), f"{row.seconds * 1e3:.2f}", f"{row.seconds / total:.1%}"]
        lines.append(f"| {' | '.join([*cells, *_rates(row, gflops, gbs)])} |")
    return "\n".join(lines)


def _rates(row: Row, gflops: float, gbs: float) -> list[str]:
    """Empty where the profile does not tell."""
    if not row.seconds or not row.bytes:
        return [""] * 4
    moved = f"{row.bytes / row.seconds * 1e-9:.2f}"
    least = max(row.flops * 1e-9 / gflops if gflops else 0.0, row.bytes * 1e-9 / gbs if gbs else 0.0)
    roof = f"{least / row.seconds:.0%}" if gflops and gbs else ""
    if not row.flops:
        return ["", moved, "", roof]
    return [f"{row.flops / row.seconds * 1e-9:.1f}", moved, f"{row.flops / row.bytes:.1f}", roof]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limits", type=Path, help="what `python bench/limits.py --json` wrote on that machine")
    parser.add_argument("--gflops", type=float, default=0.0, help="GFLOP/s of the machine, instead of --limits")
    parser.add_argument("--gbs", type=float, default=0.0, help="GB/s of its memory")
    parser.add_argument("--top", type=int, default=20, help="rows to print")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    try:
        rows = read(options.file)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gflops, gbs = read_limits(options.limits) if options.limits else (options.gflops, options.gbs)
    print(table(rows, top=options.top, gflops=gflops, gbs=gbs))
    if options.json:
        options.json.write_text(json.dumps([row.record() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
