"""Traces and tables of profilers become the right rows; the scripts profile the chosen rank and step alone."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fastrl_fast.metrics import PHASES, Clock
from fastrl_fast.profiling import step_range

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "profiles"))

import summarize  # noqa: E402
from trace_events import BETWEEN, Row, read_trace  # noqa: E402

SCRIPTS = sorted((ROOT / "profiles").glob("*.sh"))


def by_name(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.phase, row.name): row for row in rows}


def test_a_step_under_the_profiler_tells_phases_operators_and_their_flops(tmp_path: Path) -> None:
    clock, a, b = Clock(), torch.randn(64, 128), torch.randn(128, 32)
    with step_range(7, tmp_path / "profile"):
        with clock.measure("sample"):
            for _ in range(3):
                a @ b
        with clock.measure("update"):
            torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 2, 4, 16, 8).unbind())
            a.add_(1.0)
    path = tmp_path / "profile/step-7.json.gz"
    rows = by_name(read_trace(path))
    assert rows["sample", "aten::mm"].calls == 3
    assert rows["sample", "aten::mm"].flops == 3 * 2 * 64 * 128 * 32
    assert rows["sample", "aten::mm"].bytes == 3 * 4 * (64 * 128 + 128 * 32 + 64 * 32)
    attention = next(row for (phase, name), row in rows.items() if phase == "update" and "flash_attention" in name)
    assert attention.flops == 2 * 2 * (2 * 4 * 16 * 8) * 16
    assert ("update", "aten::mm") not in rows and ("sample", "aten::add_") not in rows
    spans = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["name"] in PHASES]
    assert [span["name"] for span in spans] == ["sample", "update"]
    for span in spans:
        found = sum(row.seconds for row in rows.values() if row.phase == span["name"])
        assert found == pytest.approx(span["dur"] * 1e-6), "operators and what is between them are all"
    assert ("sample", BETWEEN) in rows


def test_rollouts_one_step_ahead_count_where_the_step_waits_for_them_alone(tmp_path: Path) -> None:
    """Their thread times the same phases as the step, and the two overlap."""
    clock, own, a = Clock(), Clock(), torch.randn(64, 64)

    def collect() -> None:
        for phase in ("sample", "grade"):
            with own.measure(phase):
                a @ a

    with step_range(1, tmp_path):
        thread = threading.Thread(target=collect)
        thread.start()
        with clock.measure("update"):
            a.add(1.0)
        with clock.measure("sample"):
            thread.join()
    assert own.seconds.keys() == {"sample", "grade"}
    rows = by_name(read_trace(tmp_path / "step-1.json.gz"))
    assert {phase for phase, _ in rows} - {""} == {"update", "sample"}
    assert rows["sample", BETWEEN].calls == 1 and not any(name == "aten::mm" for _, name in rows)


def test_nothing_is_written_where_no_trace_is_wanted(tmp_path: Path) -> None:
    with step_range(1, None):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "profile").write_text("in the way")
    message = r"run_dir: cannot write .*step-1\.json\.gz"
    with pytest.raises(ValueError, match=message), step_range(1, tmp_path / "profile"):
        pass


def trace(tmp_path: Path, *events: dict[str, object]) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "tid": 1, "args": {}, **event} for event in events]}))
    return path


def test_an_operators_time_is_without_that_of_those_it_calls(tmp_path: Path) -> None:
    rows = by_name(
        read_trace(
            trace(
                tmp_path,
                {"cat": "user_annotation", "name": "score", "ts": 0.0, "dur": 100.0},
                {"cat": "cpu_op", "name": "outer", "ts": 10.0, "dur": 50.0},
                {"cat": "cpu_op", "name": "inner", "ts": 20.0, "dur": 15.0},
                {"cat": "cpu_op", "name": "inner", "ts": 40.0, "dur": 5.0},
                {"cat": "cpu_op", "name": "elsewhere", "ts": 20.0, "dur": 70.0, "tid": 2},
                {"cat": "cpu_op", "name": "late", "ts": 200.0, "dur": 1.0},
                {"cat": "user_annotation", "name": "Optimizer.step", "ts": 0.0, "dur": 300.0},
            )
        )
    )
    seconds = {name: round(row.seconds * 1e6) for (_, name), row in rows.items()}
    assert seconds == {"outer": 30, "inner": 20, "elsewhere": 70, "late": 1}
    assert rows["score", "inner"].calls == 2 and rows["", "late"].calls == 1


def test_kernels_count_for_the_operator_that_launched_them(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    rows = by_name(
        read_trace(
            trace(
                tmp_path,
                {"cat": "user_annotation", "name": "update", "ts": 0.0, "dur": 100.0},
                {"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 3.0, "args": {"External id": 5, **shapes}},
                {"cat": "kernel", "name": "sm90_gemm", "ts": 150.0, "dur": 40.0, "args": {"External id": 5}},
                {"cat": "kernel", "name": "alone", "ts": 50.0, "dur": 2.0},
            )
        )
    )
    assert rows["update", "aten::mm"].seconds == pytest.approx(40e-6)
    assert rows["update", "aten::mm"].flops == 2 * 4 * 8 * 2 and rows["update", "aten::mm"].bytes == 2 * (32 + 16 + 8)
    assert rows["update", "alone"].seconds == pytest.approx(2e-6) and len(rows) == 2


NCU = """==PROF== Connected
"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",\
"sm__ops_path_tensor_src_bf16_dst_fp32.sum"
"","","byte","ns","inst","op"
"0","fastrl::logit_fold","4,000,000","2,000","500","1,000,000"
"1","fastrl::logit_fold","4,000,000","2,000","500","1,000,000"
"2","fill","8,000","1,000","0",""
"""
NSYS = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
75.0,3000000,3,1000000.0,1000000.0,1000000,1000000,0.0,PushPop,fastrl_fast:update
25.0,1000000,1,1000000.0,1000000.0,1000000,1000000,0.0,PushPop,fastrl_fast:sample
"""


def test_counters_of_ncu_become_a_roofline(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(NCU)
    rows = by_name(summarize.read(path))
    fold = rows["", "fastrl::logit_fold"]
    assert (fold.calls, fold.seconds, fold.bytes, fold.flops) == (2, pytest.approx(4e-6), 8e6, 2 * (2 * 500 + 1e6))
    # 8 MB in 4 us are 2000 GB/s of 4000: half of what memory allows; arithmetic is far from its limit.
    line = summarize.table(list(rows.values()), top=1, gflops=1e6, gbs=4000).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")][3:-1] == ["2", "0.00", "80.0%", "500.5", "2000.00", "0.3", "50%"]
    path.write_text(NCU.replace('"ns"', '"us"'))
    with pytest.raises(ValueError, match="must be in ns"):
        summarize.read(path)


def test_tables_of_nsys_have_times_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    path = tmp_path / "nvtx_sum.csv"
    path.write_text(NSYS)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["summarize.py", str(path), "--top", "1", "--json", str(out)])
    assert summarize.main() == 0
    text = capsys.readouterr().out
    assert "|  | fastrl_fast:update | 3 | 3.00 | 75.0% |" in text and "1 more | 1 | 1.00 | 25.0%" in text
    assert [row["seconds"] for row in json.loads(out.read_text())] == [pytest.approx(3e-3), pytest.approx(1e-3)]


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"", gzip.compress(b"[]"), b"\x1f\x8b broken", b"{}"])
def test_another_file_is_one_line(content: bytes, tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / ("x.json.gz" if content[:2] == b"\x1f\x8b" else "x.json" if content == b"{}" else "x.csv")
    path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["summarize.py", str(path)])
    assert summarize.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_limits_are_those_that_the_bench_writes(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    cases = [
        {"case": "gemm 10 20 30", "runs": {"mm": {"median": 1e-6}}},
        {"case": "copy", "bytes": 5e9, "runs": {"copy_": {"median": 0.5}}},
        {"case": "launch", "runs": {"zero_": {"median": 1e-6}}},
    ]
    path.write_text(json.dumps({"cases": cases}))
    assert summarize.read_limits(path) == (pytest.approx(12.0), pytest.approx(10.0))


def run(script: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    here = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **settings}
    return subprocess.run(["bash", str(script), "--max_steps", "4"], env=here, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_profile_the_chosen_rank_and_step_alone(script: Path, tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    tool = script.name.split("_")[0]
    chosen = run(script, RANK="2", RANKS="0,2", STEP="4", OUT=str(tmp_path))
    assert chosen.returncode == 0, chosen.stderr
    first, *rest = chosen.stdout.splitlines()
    assert first.startswith(f"{tool} ") and first.rstrip().endswith("-m fastrl_fast.train --max_steps 4")
    assert re.search(r"step\\ 4@fastrl_fast|fastrl_fast@step\\ 4 ", first), "the range that profiling.py shows"
    assert rest and all(line.startswith(f"{tool} ") for line in rest)
    assert ("--clock-control none" in first) == (tool == "ncu")
    other = run(script, RANK="1", RANKS="0,2")
    assert other.stdout.strip() == "python3 -m fastrl_fast.train --max_steps 4"
    for wrong in ({"STEP": "0"}, {"RANKS": "all"}, *([{"COUNT": "0"}] if tool == "ncu" else [])):
        refused = run(script, **wrong)
        assert refused.returncode == 2 and next(iter(wrong)) in refused.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_documents_name_phases_that_there_are() -> None:
    text = (ROOT / "docs/profiling.md").read_text()
    assert set(re.findall(r"`seconds/(\w+)`", text)) <= set(PHASES)
