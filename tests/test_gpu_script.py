"""bench/gpu.sh from end to end on the CPU, and what its report says of steps and targets."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench/gpu.sh"
sys.path.insert(0, str(ROOT / "bench"))

import report  # noqa: E402
import timing  # noqa: E402


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


def test_a_failure_in_one_step_leaves_the_results_of_the_others(tmp_path):
    """The build and one bench fail; what can be measured is in the report, and the exit status says that not all is."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
  *bench/limits.py* | *bench/report.py*) exec {sys.executable} "$@" ;;
  *pip*install* | *bench/selection.py*) exit 3 ;;
esac
""")
    python.chmod(0o755)
    compilers = tmp_path / "bin"
    compilers.mkdir()
    (compilers / "g++").write_text("#!/bin/sh\necho no compiler works here >&2\nexit 4\n")
    (compilers / "g++").chmod(0o755)
    settings = {"PYTHON": str(python), "PATH": f"{compilers}:{os.environ['PATH']}"}
    done = run_script("--device", "cpu", "--quick", "--out", str(tmp_path), "--commit", "abc", **settings)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*_cpu_abc.json"))
    failed = {s["step"] for s in record["steps"] if s["status"] not in ("0",) and not s["status"].startswith("not run")}
    assert {"build_by_hand", "selection"} <= failed <= {"build", "build_by_hand", "selection"}
    assert len(record["limits"]) == 3
    assert "FAILED: selection" in done.stdout.splitlines()


@pytest.mark.slow
def test_the_compilers_alone_build_the_module(tmp_path):
    """With the copy of pybind11 that torch carries, on a machine without scikit-build-core and pybind11."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    (tmp_path / "pybind11.py").write_text("raise ImportError\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = ["bash", ROOT / "bench/build_by_hand.sh", tmp_path / "site", "cpu", sys.executable]
    built = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    script = (
        "from fastrl_fast.ops import _lib\nassert _lib.kernels.__file__.startswith(__import__('sys').argv[1])\n"
        "import torch\nfrom fastrl_fast.ops import packed_logprobs\n"
        "print(packed_logprobs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]))[0].exp().item())"
    )
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0.25", done.stderr


def case(**runs):
    return timing.Case(name="sum", runs=runs, check=lambda _: None, wanted={"eager": 2.0}, floor="eager")


def test_a_baseline_that_cannot_run_is_named_and_the_others_are_measured(capsys):
    def broken():
        raise RuntimeError("no compiler\nat all")

    measured = timing.measure(case(ours=lambda: 1, compiled=broken, eager=lambda: 2), device="cpu", repeats=3)
    assert list(measured) == ["ours", "eager"]
    assert capsys.readouterr().out == "sum: compiled cannot run: no compiler\n"


def test_a_case_that_fails_leaves_the_others_in_the_file(tmp_path, monkeypatch, capsys):
    def wrong():
        raise ValueError("a kernel failed")

    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(file), "--threads", "1"])
    with pytest.raises(SystemExit, match="failed: sum"):
        timing.main("", lambda _: [case(ours=wrong), case(ours=lambda: 1, eager=lambda: 2)])
    (kept,) = json.loads(file.read_text())["cases"]
    assert set(kept["runs"]) == {"ours", "eager"} and "a kernel failed" in capsys.readouterr().err


def test_the_bound_of_a_ratio():
    medians = {"ours": 0.010, "its products": 0.008, "eager": 0.012}
    said = "ours = products 8.000 ms (80%) + rest 2.000 ms; without the rest: eager 1.50 x"
    assert timing.bound("its products", {"eager": 2.0, "absent": 1.0}, medians) == said


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
