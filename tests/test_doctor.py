"""The doctor says what works and why not what does not, also where nothing is installed at all."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastrl_fast import doctor, missing
from fastrl_fast.ops import _lib

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["doctor"])


def test_a_machine_that_passes_these_tests_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "training works here"
    assert [line[5:21].strip() for line in lines[:-1]] == list(doctor.CHECKS)
    assert all(line[:4].strip() in ("ok", "off") for line in lines[:-1])


def test_a_checkout_without_anything_installed_says_what_to_do() -> None:
    """-S: no site-packages, so no library but Python's own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-m", "fastrl_fast.doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stderr
    assert "no   libraries        torch, transformers, " in done.stdout
    assert "run `pip install .` in the checkout of fastrl_fast" in done.stdout
    assert "not installed: `pip install .` there compiles and installs it" in done.stdout
    assert "training cannot work: libraries, compiled module" in done.stdout


COMMANDS = ("-m fastrl_fast.train --max_steps 1", "-m fastrl_fast.evaluate x", "-m fastrl_fast.console train")


@pytest.mark.parametrize("command", [*COMMANDS, "-m fastrl_fast.export a b", "-m fastrl_fast.report x"])
def test_a_command_without_its_libraries_is_one_line(command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-S", *command.split()], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(r"error: not installed: torch, .*jsonargparse, .*; run `pip install \.` in .*\n", done.stderr)


def test_the_console_script_reaches_the_doctor_without_libraries() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = "import sys; sys.argv[1:] = [{!r}]; from fastrl_fast.console import main; main()"
    results = [
        subprocess.run([sys.executable, "-S", "-c", script.format(name)], env=env, capture_output=True, text=True)
        for name in ("doctor", "train")
    ]
    assert [done.returncode for done in results] == [1, 2]
    assert "training cannot work" in results[0].stdout
    assert results[1].stderr.startswith("error: not installed: torch, ") and results[1].stderr.count("\n") == 1


def test_what_is_looked_for_is_what_is_declared() -> None:
    """Names as imported, against the requirements of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert block is not None
    declared = {re.split(r"[<>=\[; ]", name)[0].lower() for name in re.findall(r'"([^"]+)"', block[1])}
    known = {"math_verify": "math-verify", "yaml": "pyyaml", "PIL": "pillow"}
    assert {known.get(name, name) for name in missing.NEEDED} == declared


def test_a_module_of_other_sources_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lib, "INTERFACE", -1)
    with pytest.raises(ImportError, match=r"needs -1: run `pip install \.` again"):
        _lib.load_kernels()
    monkeypatch.setitem(sys.modules, "_fastrl_fast", None)
    with pytest.raises(ImportError, match=r"_fastrl_fast cannot be imported .*: run `pip install \.` again"):
        _lib.load_kernels()


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch, *, torchs: str | None, module: bool, devices: int, capability=(9, 0)
) -> str:
    monkeypatch.setattr(torch.version, "cuda", torchs)
    monkeypatch.setattr(_lib, "kernels", SimpleNamespace(CUDA=module))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU{i}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    finding = doctor.cuda()
    return f"{finding.verdict}: {finding.text}"


def test_every_combination_of_cuda_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA torch with a CPU build of the module, the reverse, no driver, a hidden or an old GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert fake_cuda(monkeypatch, torchs=None, module=False, devices=0).startswith("off: torch")
    assert "cannot use" in fake_cuda(monkeypatch, torchs=None, module=True, devices=0)
    assert "no NVIDIA driver" in fake_cuda(monkeypatch, torchs="12.8", module=True, devices=0)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "driver shows no device" in fake_cuda(monkeypatch, torchs="12.8", module=True, devices=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in fake_cuda(monkeypatch, torchs="12.8", module=True, devices=0)
    assert fake_cuda(monkeypatch, torchs="12.8", module=False, devices=1).startswith("no: GPU0: torch uses it, but")
    old = fake_cuda(monkeypatch, torchs="12.8", module=True, devices=1, capability=(7, 5))
    assert old.startswith("no: GPU0: compute capability 7.5")
    assert fake_cuda(monkeypatch, torchs="12.8", module=True, devices=2) == "ok: GPU0, GPU1; torch has CUDA 12.8"


def test_versions_memory_and_disk_have_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.7.1" if name == "torch" else "4.56.0")
    assert doctor.libraries().text == "torch 2.7.1; 2.8 or newer is needed: pip install -U torch"
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.10.0+cu128" if name == "torch" else "5.0.0rc1")
    assert doctor.libraries().verdict == "ok"
    monkeypatch.setattr(doctor, "MEMORY_GB", 1e9)
    assert doctor.memory().verdict == "no"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 10))
    assert doctor.disk().verdict == "no" and "0.0 GB free" in doctor.disk().text


def test_I02_a_flash_attention_of_another_torch_is_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    """I02: undefined symbol _ZN3c105Error..."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "flash_attn" else find(name))

    def broken(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c105ErrorC2E")

    monkeypatch.setattr(importlib, "import_module", broken)
    finding = doctor.flash_attention()
    assert finding.verdict == "off" and "built for another torch" in finding.text and "_ZN3c10" in finding.text


def test_ranks_that_cannot_talk_and_checks_that_break_are_findings(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(doctor, "TALK", "raise SystemExit('no route to host')")
    assert doctor.ranks().text.endswith("cannot talk over gloo: no route to host")

    def breaks() -> doctor.Finding:
        raise OSError("gone")

    monkeypatch.setattr(doctor, "CHECKS", {"disk": breaks})
    assert doctor.main() == 1
    assert capsys.readouterr().out == "no   disk             OSError: gone\ntraining cannot work: disk\n"
