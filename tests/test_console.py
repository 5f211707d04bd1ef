"""`fastrl COMMAND`: each command is reached, mistakes are one line, and a real shell completes it all."""

import importlib
import importlib.util
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from fastrl_fast import __version__, cli, console
from fastrl_fast.tables import build_console, print_line, print_table, visible


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastrl", *args])
    with pytest.raises(SystemExit) as ended:
        console.main()
    return ended.value.code or 0


def test_help_names_every_command(monkeypatch, capsys) -> None:
    for args in ([], ["--help"], ["-h"]):
        assert run(monkeypatch, *args) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in console.COMMANDS)
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_command_gets_its_arguments_and_gives_its_code(name, monkeypatch) -> None:
    if importlib.util.find_spec(f"fastrl_fast.{name}") is None:
        pytest.skip(f"there is no fastrl_fast.{name} yet")
    seen: list[list[str]] = []
    module = importlib.import_module(f"fastrl_fast.{name}")
    monkeypatch.setattr(module, "main", lambda: seen.append(sys.argv) or 7)
    assert run(monkeypatch, name, "--a.b", "c d") == 7
    assert seen == [[f"fastrl {name}", "--a.b", "c d"]]


def test_mistakes_are_one_line(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "trian") == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("error: fastrl: no command 'trian' (did you mean 'train'?); there are")
        and line.count("\n") == 1
    )
    assert run(monkeypatch, "completion", "cmd.exe") == 2
    assert "one of bash, zsh, tcsh, fish, got 'cmd.exe'" in capsys.readouterr().err
    assert run(monkeypatch, "completion") == 2
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "shtab" else find(name))
    assert run(monkeypatch, "completion", "bash") == 2
    assert "pip install 'fastrl_fast[completion]'" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_traceback() -> None:
    command = [sys.executable, "-c", "from fastrl_fast import cli; cli.run(lambda: print('x' * 10**6) or 0)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == b"xxx"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_another_broken_pipe_is_a_defect() -> None:
    def breaks() -> int:
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError):
        cli.run(breaks)


def test_the_doctor_has_a_help_too(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "doctor", "--help") == 0
    assert "exit code 1" in capsys.readouterr().out


def test_ctrl_c_ends_any_command_without_a_traceback(monkeypatch, capsys) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert run(monkeypatch, "train") == 130
    assert capsys.readouterr() == ("", "")


COMPLETE = """
source "$1"; shift
COMP_WORDS=(fastrl "$@"); COMP_CWORD=$#
_shtab_fastrl fastrl "${@: -1}" "${COMP_WORDS[$#-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_settings_values_and_folders(monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab: pip install 'fastrl_fast[completion]'")
    assert run(monkeypatch, "completion", "bash") == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "my_run").mkdir()

    def offered(*words: str) -> list[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(script), *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert offered("") == [*console.COMMANDS, "completion"]
    assert offered("tra") == ["train"]
    assert sorted(offered("train", "--prune.w")) == ["--prune.weighting", "--prune.wrong_per_right"]
    assert offered("train", "--model.dtype", "") == ["float32", "bfloat16"]
    assert offered("train", "--overwrite", "") == ["true", "false"]
    assert "gsm8k_smollm2" in offered("train", "--config", "")
    assert offered("train", "--dry") == ["--dry_run"] and offered("evaluate", "--dry") == []
    assert offered("report", "my") == ["my_run"]


@pytest.mark.parametrize("shell", [shell for shell in console.SHELLS if shell != "bash"])
def test_every_shell_gets_a_script_with_all_settings(shell, monkeypatch, capsys) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab: pip install 'fastrl_fast[completion]'")
    assert run(monkeypatch, "completion", shell) == 0
    out = capsys.readouterr().out
    assert "prompts_per_step" in out and "multiplicity" in out


def test_a_table_is_plain_in_a_pipe_and_ruled_in_a_terminal(capsys) -> None:
    rows = [["a [b]", "1"], ["long " * 40, "22"]]
    print_table(build_console(), ["word", "number"], rows)
    print_line(build_console(), "x" * 500)
    out = capsys.readouterr().out
    assert out.isascii() and out.count("\n") == 4 and "a [b]" in out and "x" * 500 in out
    print_table(Console(force_terminal=True, width=60), ["word", "number"], rows)
    out = capsys.readouterr().out
    assert "╭" in out and "\x1b[1;36m" in out and max(map(len, out.splitlines()[-2:])) <= 60


def test_control_characters_are_made_visible() -> None:
    assert visible("a\tb\n\r\x7f\x1b[31m\ud800") == "a\tb\n␍␡␛[31m\\ud800"
