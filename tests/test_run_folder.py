"""The run folder: new, gone on with, refused; and files of others that nobody touches."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fastrl_fast import cli, run_folder
from fastrl_fast.config import Config
from fastrl_fast.run_folder import finished_steps, load_settings, open_run_folder, write_summary


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@functools.cache
def config(*argv: str) -> Config:
    return cli.parse(list(argv), prog="train")[0]


def settings(*argv: str) -> dict:
    return cli.to_dict(config(*argv))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_folder_holds_the_settings():
    given = settings("--data.system_prompt", "Dénken: 'x'", "--seed", "3")
    folder = open_run_folder(given | {"run_dir": "a/b/c"}, "demo", total_steps=4)
    assert folder == Path("a/b/c")
    assert load_settings(folder) == given | {"run_dir": "a/b/c"}
    assert cli.to_dict(cli.parse(["--config", str(folder / "config.yaml")], prog="t")[0]) == load_settings(folder)
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "empty").mkdir()
    open_run_folder(settings("--run_dir", "empty"), "demo", total_steps=4)
    # Killed while the settings were being written.
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / ".partial-config.yaml").write_text("model:\n  pa")
    open_run_folder(settings("--run_dir", "torn"), "demo", total_steps=4)
    assert [p.name for p in (tmp_path / "torn").iterdir()] == ["config.yaml"]


def test_an_unfinished_run_of_the_same_settings_is_gone_on_with():
    first = open_run_folder(settings("--run_dir", "r"), "demo", total_steps=4)
    (first / "metrics.jsonl").write_text("kept\n")
    free = ["--max_steps", "9", "--epochs", "2", "--checkpoint.every", "1", "--log.rollouts", "false"]
    free += ["--eval.every", "3", "--reward.workers", "1"]
    again = open_run_folder(settings("--run_dir", "r", *free), "demo", total_steps=9)
    assert again == first and (again / "metrics.jsonl").read_text() == "kept\n"
    assert load_settings(again)["max_steps"] == 9


@pytest.mark.parametrize(
    ("key", "was", "value"),
    [
        ("seed", "0", "1"),
        ("optimizer.lr", "0.25", "0.5"),
        ("prune.method", "'mdap'", "none"),
        ("reward.functions", "", "{exact: 2.0}"),
        ("rollout.stop_token_ids", "[]", "[7]"),
    ],
)
def test_another_run_names_the_field_that_differs(key, was, value):
    folder = open_run_folder(settings("--run_dir", "r", "--optimizer.lr", "0.25"), "demo", total_steps=4)
    before = snapshot(folder)
    with pytest.raises(ValueError, match=rf"^run_dir: r holds a run with {key}.* = {re.escape(was)}") as error:
        other = settings("--run_dir", "r", "--optimizer.lr", "0.25", f"--{key}", value)
        open_run_folder(other, "demo", total_steps=4)
    assert "--overwrite true" in str(error.value)
    assert snapshot(folder) == before


def test_a_finished_run_is_refused_until_more_steps_are_asked_for():
    folder = open_run_folder(settings("--run_dir", "r"), "demo", total_steps=4)
    write_summary(folder, {"steps": 4, "before": {}})
    assert finished_steps(folder) == 4
    for total in (3, 4):
        with pytest.raises(ValueError, match="finished run of 4 steps; raise --max_steps"):
            open_run_folder(settings("--run_dir", "r"), "demo", total_steps=total)
    open_run_folder(settings("--run_dir", "r", "--max_steps", "5"), "demo", total_steps=5)


def test_default_folders_are_numbered_behind_finished_runs():
    names = []
    for _ in range(3):
        folder = open_run_folder(settings(), "demo", total_steps=2)
        assert open_run_folder(settings(), "demo", total_steps=2) == folder, "unfinished: the same again"
        write_summary(folder, {"steps": 2})
        names.append(str(folder))
    assert names[0].startswith("runs/demo-") and names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]
    others = open_run_folder(settings("--seed", "1"), "demo", total_steps=2)
    assert str(others) not in names, "other settings, other folder"
    assert str(open_run_folder(settings("--overwrite", "true"), "demo", total_steps=2)) == names[0]


@pytest.mark.parametrize("overwrite", ["false", "true"])
@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", "config.yaml/inner", "checkpoints/mine"])
def test_folders_of_others_are_never_touched(name, overwrite, tmp_path):
    """Many programs keep a config.yaml; that alone does not make a folder ours."""
    theirs = tmp_path / "r" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text(yaml.safe_dump({"model": "resnet", "hydra": {"run": 1}}))
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="run_dir: r holds files that are not of a run"):
        open_run_folder(settings("--run_dir", "r", "--overwrite", overwrite), "demo", total_steps=4)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "just text"])
def test_a_config_that_is_none_is_not_ours(text, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="not of a run"):
        open_run_folder(settings("--run_dir", "r", "--overwrite", "true"), "demo", total_steps=4)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "r").write_text("x")
    with pytest.raises(ValueError, match="run_dir: r is a file"):
        open_run_folder(settings("--run_dir", "r", "--overwrite", "true"), "demo", total_steps=4)
    assert (tmp_path / "r").read_text() == "x"


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path):
    folder = open_run_folder(settings("--run_dir", "r"), "demo", total_steps=4)
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "big_disk"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    (folder / "tensorboard").symlink_to(elsewhere)
    write_summary(folder, {"steps": 4})
    open_run_folder(settings("--run_dir", "r", "--seed", "5", "--overwrite", "true"), "demo", total_steps=4)
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "notes.txt"]
    assert load_settings(folder)["seed"] == 5 and (elsewhere / "kept").is_file()


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path):
    """The same command started twice; afterwards it is free again, however the other one ended."""
    folder = open_run_folder(settings("--run_dir", "r", "--seed", "7"), "demo", total_steps=4)
    os.close(run_folder._held.pop(folder.resolve()))
    program = f"import fcntl, os; fcntl.flock(os.open('{folder}', os.O_RDONLY), fcntl.LOCK_EX); print(); input()"
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"\n"
    before = snapshot(folder)
    for overwrite in ("false", "true"):
        with pytest.raises(ValueError, match="run_dir: another process is writing to r"):
            open_run_folder(settings("--run_dir", "r", "--overwrite", overwrite), "demo", total_steps=4)
    assert snapshot(folder) == before
    other.kill()
    other.communicate()
    open_run_folder(settings("--run_dir", "r", "--seed", "7"), "demo", total_steps=4)


def test_a_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(ValueError, match="run_dir: cannot make /proc/none"):
        open_run_folder(settings("--run_dir", "/proc/none"), "demo", total_steps=4)


def test_load_settings_wants_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"is not the folder of a run \(no config.yaml\)"):
        load_settings(tmp_path)


def test_summary_is_json(tmp_path):
    write_summary(tmp_path, {"steps": 3, "after": {"avg@1": 0.5}})
    assert json.loads((tmp_path / run_folder.SUMMARY_FILE).read_text()) == {"steps": 3, "after": {"avg@1": 0.5}}
    assert finished_steps(tmp_path / "none") == 0
