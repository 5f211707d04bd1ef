"""Public bug reports about building, each on its smallest input."""

import importlib.util
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "echo 'Cuda compilation tools, release 10.1, V10.1.243'"
HOST = "echo '#error -- unsupported GNU version! gcc versions later than 13 are not supported!' >&2; exit 1"


def configure(tmp_path: Path, nvcc: str, cuda: str) -> subprocess.CompletedProcess[str]:
    """CMake over this checkout with a compiler on PATH that says what `nvcc` prints."""
    if shutil.which("cmake") is None or importlib.util.find_spec("pybind11") is None:
        pytest.skip("CMake or pybind11 is not installed beside the tests")
    import pybind11

    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
    compiler.chmod(0o755)
    env = os.environ | {"PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"}
    settings = [f"-DFASTRL_CUDA={cuda}", "-DSKBUILD_PROJECT_VERSION=0", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", *settings]
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=300)


def test_I05_an_nvcc_that_does_not_work_leaves_a_build_for_the_cpu(tmp_path: Path) -> None:
    """The module links no torch, so whose CUDA torch has does not matter; what cannot compile is not used."""
    done = configure(tmp_path, OLD, "AUTO")
    assert done.returncode == 0 and "fastrl_fast: CUDA kernels OFF" in done.stdout


def test_I11_a_host_compiler_too_new_is_told_while_configuring(tmp_path: Path) -> None:
    done = configure(tmp_path, HOST, "ON")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "FASTRL_CUDA=ON, but no CUDA compiler works" in message and "CUDAHOSTCXX" in message


def test_I10_an_sdist_is_whole_and_made_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("scikit_build_core") is None or not (ROOT / ".git").exists():
        pytest.skip("needs scikit-build-core, and a checkout to compare with")
    from scikit_build_core.build import build_sdist

    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith(".ci/") and (ROOT / name).exists():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "copy" / name)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as made:
        held = {name.partition("/")[2] for name in made.getnames()}
    needed = {
        n for n in tracked if n.startswith(("csrc/", "fastrl_fast/")) or n in ("CMakeLists.txt", "pyproject.toml")
    }
    assert len(needed) > 50 and needed <= held
