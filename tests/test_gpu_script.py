"""bench/gpu.sh from end to end on the CPU, and what its report says of steps and targets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench/gpu.sh"
sys.path.insert(0, str(ROOT / "bench"))

import report  # noqa: E402


def run_script(*options, **settings):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **settings}
    return subprocess.run(["bash", SCRIPT, *options], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_step_runs_without_a_gpu_and_the_report_names_them(tmp_path):
    done = run_script("--device", "cpu", "--quick", "--no-build", "--out", str(tmp_path), "--commit", "abc")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*_cpu_abc.json"))
    assert [s["step"] for s in record["steps"] if s["status"] == "0"] == [*report.BENCHES, "small_cases"]
    assert {s["step"] for s in record["steps"] if s["status"] != "0"} == {"tests", "memcheck", "racecheck", "synccheck"}
    assert len(record["limits"]) == 3 and all(record["benches"].values())
    (text,) = (path.read_text() for path in tmp_path.glob("*_cpu_abc.md"))
    assert "| policy_loss | passed |" in text and "| memcheck | not run: it needs a GPU |" in text


def test_the_plan_for_a_gpu_names_every_step_and_its_limit():
    done = run_script("--dry-run")
    assert done.returncode == 0, done.stderr
    for step in (*report.BENCHES, "tests", "small_cases", "memcheck", "racecheck", "synccheck"):
        assert f"\n{step} " in f"\n{done.stdout}"
    assert re.search(r"^build(_by_hand)? ", done.stdout, re.M), "by hand where scikit-build-core is not installed"
    assert "--device cuda" in done.stdout


@pytest.mark.parametrize("option", ["--device=cpu", "--devices", "--out"])
def test_a_wrong_option_ends_it(option):
    done = run_script(option)
    assert done.returncode == 2 and option in done.stderr


def test_a_failed_step_and_a_missed_target_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "steps.tsv").write_text("limits\t0\t3\ntests\t1\t9\nselection\t124\t60\nmemcheck\tnot run: why\t0\n")
    timing = {"median": 2e-3, "low": 1e-3, "high": 3e-3, "peak_mb": 1.0}
    runs = {"ours": timing, "one GEMM": {**timing, "median": 1.8e-3}, "eager": {**timing, "median": 4e-3}}
    case = {"case": "score", "wanted": {"one GEMM": 0.95, "eager": 1.5}, "bytes": 4e6, "runs": runs}
    machine = {"gpu": "NVIDIA H200 (x)", "load": 1.0}
    copy = {"case": "copy", "wanted": {}, "bytes": 8e6, "runs": {"copy_": timing}}
    for name, cases in (("limits", [copy]), ("packed_logprobs", [case])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": machine, "cases": cases}))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--out", str(tmp_path), "--commit", "c", "--command", "x"])
    assert report.main() == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["FAILED: tests", "FAILED: selection"]
    (text,) = (path.read_text() for path in tmp_path.glob("*_nvidia-h200-x_c.md"))
    for part in (
        "| tests | FAILED: exit status 1 | 9 |",
        "| selection | FAILED: took too long | 60 |",
        "0.95 MISSED",
        "1.50 reached",
        "copy, GB/s: 4",
        "4.0 MB at 50% of the speed of a copy",
    ):
        assert part in text
