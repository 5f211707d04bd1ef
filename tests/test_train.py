"""The command itself: it trains, survives being killed, and answers bad input with one line and exit code 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl_fast import cli, evaluate, export, train
from fastrl_fast.checkpoint import choose, load_weights
from fastrl_fast.training_run import TrainingRun

SMALL = [
    "--data.prompts_per_step=4",
    "--budget.group_size=4",
    "--rollout.max_completion_tokens=24",
    "--eval.prompts=16",
    "--reward.workers=1",
]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "fastrl_fast.train", *SMALL, *args]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    args = command("--max_steps=6", "--checkpoint.every=2", f"--run_dir={folder}", "--eval.every=3")
    done = subprocess.run(args, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out avg@1" in done.stdout
    *_, wrote, report, exported = done.stdout.splitlines()
    files = "config.yaml, metrics.jsonl, rollouts.jsonl, summary.json, checkpoints"
    assert wrote.startswith(f"wrote {folder}: ") and set(files.split(", ")) <= set(wrote.split(": ")[1].split(", "))
    assert report == f"next: python -m fastrl_fast.report {folder}"
    assert exported.strip() == f"python -m fastrl_fast.export {folder} OUT_FOLDER"
    return folder


def test_a_run_writes_what_it_says(whole_run: Path) -> None:
    metrics = records(whole_run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in metrics if "eval/avg@1" in m] == [3, 6]
    rollouts = records(whole_run / "rollouts.jsonl")
    assert len(rollouts) == 6 * 16
    for m in metrics:
        own = [r for r in rollouts if r["step"] == m["step"]]
        assert m["rollouts/kept"] == sum(r["kept"] for r in own)
        assert m["reward/mean"] == pytest.approx(sum(r["reward"] for r in own) / len(own))
        assert m["tokens/generated"] == sum(r["tokens"] for r in own)
        assert all(r["kept"] == (r["drop_reason"] == "") for r in own)
    # Until the first update the sampler and the policy are the same model.
    assert metrics[0]["policy/sampler_gap"] < 1e-5
    assert metrics[0]["policy/ratio"] == 1.0
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == ["step_000004", "step_000006"]


@pytest.mark.parametrize("kill_after", [1, 3])
def test_a_killed_run_goes_on_to_bit_equal_parameters(whole_run: Path, tmp_path: Path, kill_after: int) -> None:
    folder = tmp_path / "run"
    args = command("--max_steps=6", "--checkpoint.every=2", f"--run_dir={folder}", "--eval.every=3")
    process = subprocess.Popen(args, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = folder / "metrics.jsonl"
    limit = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= kill_after):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(args, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = load_weights(choose(folder / "checkpoints")), load_weights(choose(whole_run / "checkpoints"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    same = ("reward/mean", "loss/value", "rollouts/kept", "eval/avg@1", "optimizer/grad_norm")
    for mine, other in zip(records(metrics), records(whole_run / "metrics.jsonl"), strict=True):
        assert {k: mine.get(k) for k in ("step", *same)} == {k: other.get(k) for k in ("step", *same)}
    assert len(records(folder / "rollouts.jsonl")) == 6 * 16


def test_a_finished_run_is_not_touched(whole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole_run.rglob("*") if p.is_file()}
    same = [*SMALL, f"--run_dir={whole_run}", "--eval.every=3", "--checkpoint.every=2"]
    assert "finished run of 6 steps" in fails(monkeypatch, capsys, *same, "--max_steps=6")
    assert "prune.tau" in fails(monkeypatch, capsys, *same, "--max_steps=9", "--prune.tau=0.5")
    assert before == {p: p.stat().st_mtime_ns for p in whole_run.rglob("*") if p.is_file()}


def test_export_and_evaluate_read_the_run(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["export", str(whole_run), str(out)])
    assert export.main() == 0
    said = capsys.readouterr().out
    assert f"wrote {out}: the weights of {whole_run / 'checkpoints' / 'step_000006'} in float32" in said
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "whoever reads one may read all"
    lm = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    weights = load_weights(choose(whole_run / "checkpoints"))
    assert all(torch.equal(parameter, weights[name]) for name, parameter in lm.named_parameters())
    assert len(AutoTokenizer.from_pretrained(out)) > 0
    with pytest.raises(ValueError, match="out_dir"):
        export.export(whole_run, out)
    with pytest.raises(ValueError, match=r"run_dir: .* is not the folder of a run"):
        export.export(tmp_path / "none", tmp_path / "other")
    monkeypatch.setattr(sys, "argv", ["evaluate", str(whole_run), "--eval.path=null"])
    with pytest.raises(ValueError, match=r"got None: give --eval\.path FILE$"):
        evaluate.main()
    monkeypatch.setattr(sys, "argv", ["evaluate", str(whole_run)])
    assert evaluate.main() == 0
    assert json.loads(capsys.readouterr().out)["avg@1"] == records(whole_run / "metrics.jsonl")[-1]["eval/avg@1"]


def test_the_log_is_closed_when_a_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open progress bar leaves the terminal without a cursor."""
    logs = []

    def interrupted(run: TrainingRun) -> None:
        logs.append(run.parts.log)
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRun, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, f"--run_dir={tmp_path / 'run'}"])
    with pytest.raises(KeyboardInterrupt):
        train.main()
    assert not logs[0].progress.live.is_started


def test_only_the_first_rank_prints_an_evaluation(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: {"avg@1": 0.5})
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    assert evaluate.main() == 0
    assert capsys.readouterr().out == '{"avg@1": 0.5}\n'
    monkeypatch.setattr("fastrl_fast.distributed.rank", lambda: 1)
    assert evaluate.main() == 0
    assert capsys.readouterr().out == ""


def fails(monkeypatch: pytest.MonkeyPatch, capsys, *args: str) -> str:
    """The one line that the command answers with, after checking that it is one line and exit code 2."""
    monkeypatch.setattr(sys, "argv", ["train", *args])
    with pytest.raises(SystemExit) as ended:
        cli.run(train.main)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def data_file(folder: Path, rows: list[dict]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = f"--run_dir={tmp_path / 'run'}"
    rows = [{"prompt": f"Name the first number of {i}, {i + 1}:", "answer": str(i)} for i in range(3)]
    good = data_file(tmp_path, rows)

    def line(*args: str) -> str:
        return fails(monkeypatch, capsys, run, *args)

    assert "data.path" in line("--data.path=missing.jsonl")
    assert "question_text" in line(f"--data.path={good}", "--data.prompt_column=question_text")
    assert "data.prompts_per_step" in line(f"--data.path={good}", "--data.prompts_per_step=4")
    unanswered = data_file(tmp_path / "unanswered", [{"prompt": row["prompt"]} for row in rows])
    assert "needs the column 'answer'" in line(f"--data.path={unanswered}", "--data.prompts_per_step=2")
    assert "needs the column 'answer'" in line(f"--eval.path={unanswered}")
    mine = tmp_path / "mine.py"
    mine.write_text("def f(completions, answr, extra=None, **columns):\n    return [1.0] * len(completions)\n")
    wrong = line(f"--data.path={good}", f"--reward.functions={{'{mine}:f': 1.0}}", "--data.prompts_per_step=2")
    assert "mine.py:f' needs the column 'answr'; the data has: answer" in wrong
    assert "no recipe 'fastlr'" in line("--config=fastlr")
    assert "model.path" in line("--model.path=no/such/folder")
    assert "prune.tau" in line("--prune.tau=2")
    assert "reward.functions" in line("--reward.functions={maths: 1.0}")
    assert "log.trackers" in line("--log.trackers=[trackio]")
    assert "log.profile_steps must be steps of this run, 1 to 4, got [2, 5]" in line(
        "--max_steps=4", "--log.profile_steps=[2, 5]"
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "data.path" in line(f"--data.path={empty}")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_an_answer_column_of_numbers_is_text_to_the_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"Name the first number of {i}, {i + 1}:", "answer": i} for i in range(4)]
    args = [*SMALL, f"--data.path={data_file(tmp_path, rows)}", f"--run_dir={tmp_path / 'run'}", "--max_steps=1"]
    monkeypatch.setattr(sys, "argv", ["train", *args])
    assert train.main() == 0
    assert len(records(tmp_path / "run" / "rollouts.jsonl")) == 16


def test_foreign_files_in_the_run_folder_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    assert "run_dir" in fails(monkeypatch, capsys, f"--run_dir={folder}", "--overwrite=true")
    assert (folder / "thesis.tex").read_text() == "years of work"
