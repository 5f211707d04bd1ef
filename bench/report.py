"""Gather what the steps of bench/gpu.sh left in a folder into DATE_DEVICE_COMMIT.json and .md.

python bench/report.py FOLDER --out DIR --commit NAME --command TEXT
"""

import argparse
import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import timing

BENCHES = ("limits", "packed_logprobs", "group_advantage", "selection", "policy_loss")
EXPECTED = """## Expected beforehand, of one H200; nothing here was measured

- Scoring within 10 % of one bfloat16 GEMM: 22.6 ms at H = 3584, V = 152064 and 9.7 ms at H = 1536, V = 151936, at 790
  TFLOP/s. Loss and gradient with the fused operator within 15 % of three.
- Extra memory below 1.5 GB, where PyTorch with all logits takes 35 GB.
- The kernels on logits within 20 % of the time in which their bytes are copied.
- group_advantage, choose_rollouts and policy_loss: a few launches long.
"""


def steps(folder: Path) -> list[dict[str, Any]]:
    """What each step came to, in order; `status` is 0, an exit status (124: it ran too long) or why it was not run."""
    lines = (folder / "steps.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    return [{"step": name, "status": status, "seconds": int(seconds)} for name, status, seconds in rows]


def failed(steps: list[dict[str, Any]]) -> list[str]:
    return [s["step"] for s in steps if s["status"] != "0" and not s["status"].startswith("not run")]


def limits(record: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s by size of the GEMM, GB/s of a copy, microseconds of a launch."""
    found = {}
    for case in record["cases"]:
        (run,) = case["runs"].values()
        name, *sizes = case["case"].split()
        if name == "gemm":
            t, h, v = map(int, sizes)
            found[f"GEMM {t} x {h} x {v}, TFLOP/s"] = 2 * t * h * v / run["median"] / 1e12
        elif name == "copy":
            found["copy, GB/s"] = case["bytes"] / run["median"] / 1e9
        else:
            found["launch, us"] = run["median"] * 1e6
    return found


def table(case: dict[str, Any], measured: dict[str, float]) -> str:
    """Markdown: a row per run of a case; ratios are their time / ours, above 1 is slower than ours."""
    ours = next(iter(case["runs"].values()))["median"]
    rows = [f"### {case['case']}", "", "| run | ms | lowest | highest | extra MB | ratio | wanted |", "|" + "---|" * 7]
    for name, run in case["runs"].items():
        times = " | ".join(f"{1e3 * run[key]:.3f}" for key in ("median", "low", "high"))
        wanted = case["wanted"].get(name)
        ratio = run["median"] / ours
        aim = "" if wanted is None else f"{wanted:.2f} {'reached' if ratio >= wanted else 'MISSED'}"
        rows.append(f"| {name} | {times} | {run['peak_mb']:.1f} | {ratio:.2f} | {aim} |")
    if case.get("floor") in case["runs"]:
        medians = {name: run["median"] for name, run in case["runs"].items()}
        rows += ["", f"{timing.bound(case['floor'], case['wanted'], medians)}."]
    if case["bytes"] and "copy, GB/s" in measured:
        share = case["bytes"] / ours / 1e9 / measured["copy, GB/s"]
        rows += ["", f"Ours moves {case['bytes'] / 1e6:.1f} MB at {share:.0%} of the speed of a copy."]
    return "\n".join(rows)


def markdown(title: str, command: str, record: dict[str, Any]) -> str:
    parts = [f"# {title}", f"`{command}`. Runs take turns; median, lowest, highest, most memory beyond what was there."]
    parts.append("\n".join(f"- {name}: {value}" for name, value in record["machine"].items() if value is not None))
    lines = ["| step | result | s |", "|---|---|---|"]
    for s in record["steps"]:
        status = s["status"]
        failure = "FAILED: took too long" if status == "124" else f"FAILED: exit status {status}"
        result = "passed" if status == "0" else failure if status.isdigit() else status
        lines.append(f"| {s['step']} | {result} | {s['seconds']} |")
    parts += ["## Steps", "\n".join(lines), "## Limits of this machine, measured first"]
    parts.append("\n".join(f"- {name}: {value:.4g}" for name, value in record["limits"].items()) or "not measured")
    for bench, cases in record["benches"].items():
        parts.append(f"## {bench}")
        parts += [table(case, record["limits"]) for case in cases]
    return "\n\n".join([*parts, EXPECTED])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True, help="what was run")
    options = parser.parse_args()
    found = {b: json.loads(f.read_text()) for b in BENCHES if (f := options.folder / f"{b}.json").is_file()}
    machine = next(iter(found.values()))["machine"] if found else timing.machine("cpu", 0)
    record = {
        "machine": machine,
        "steps": steps(options.folder),
        "limits": limits(found["limits"]) if "limits" in found else {},
        "benches": {bench: result["cases"] for bench, result in found.items() if bench != "limits"},
    }
    device = re.sub(r"\W+", "-", machine["gpu"] or "cpu").strip("-").lower()
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{date.today()}_{device}_{options.commit}"
    title = f"Operators on {machine['gpu'] or 'a CPU'}, commit {options.commit}, {date.today()}"
    Path(f"{target}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{target}.md").write_text(markdown(title, options.command.strip(), record))
    print(f"\n{target}.md")
    for step in failed(record["steps"]):
        print(f"FAILED: {step}")
    return int(bool(failed(record["steps"])))


if __name__ == "__main__":
    sys.exit(main())
