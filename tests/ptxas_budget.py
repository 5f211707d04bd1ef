"""Compile every CUDA source for every architecture and hold each kernel to a budget: `python tests/ptxas_budget.py`.

Reads what `ptxas -v` says. Exit status 1 on a compiler warning, a spill, a stack frame or too many registers.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = sorted((CSRC / "kernels/cuda").glob("*.cu"))
ARCHITECTURES = (80, 90, 100)
FLAGS = [
    "-std=c++17", "-fmad=false", "-lineinfo", "-O3", f"-I{CSRC}",
    "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas=-v",
]  # fmt: skip

REGISTERS = {
    # at most a few hundred blocks of 128: nothing to gain below 64
    "group_advantage_kernel": 64,
    # bound by memory: 2048 threads a multiprocessor hide its latency, and 65536 / 2048 = 32; 40 leave 1536
    "logit_fold_kernel": 40,
    "logit_grad_kernel": 40,
    "gradient_sketch_kernel": 48,
    # seldom more than a few hundred blocks of 256, so two on a multiprocessor are enough for `match`; the other rules
    # take about 64
    "choose_rollouts_kernel": 128,
    # float64 throughout, seldom more than a few thousand blocks of 128; 64 leave 1024 threads
    "policy_loss_sequence_kernel": 64,
    "policy_loss_total_kernel": 64,
    # 48 leave 1280 threads, five blocks of 256
    "select_diverse_kernel": 48,
}
"""The most registers per thread, by the name of the kernel; all instances of a template share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one kernel takes on one architecture."""

    kernel: str
    architecture: str
    registers: int
    stack: int
    spills: int
    """Bytes stored and loaded."""


def compile_source(source: Path, folder: Path) -> str:
    """Return what nvcc printed; its cubins are for all `ARCHITECTURES`.

    Raises:
        RuntimeError: nvcc failed, which a warning makes it do.
    """
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command = ["nvcc", *FLAGS, *targets, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def usages(printed: str) -> Iterator[Usage]:
    """Read the report of each kernel in the output of `ptxas -v`."""
    for part in printed.split("Compiling entry function ")[1:]:
        name, architecture = re.findall(r"'(\w+)' for '(\w+)'", part)[0]
        stack, stored, loaded = map(
            int, re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)[0]
        )
        registers = int(re.findall(r"Used (\d+) registers", part)[0])
        kernel = _kernel_of(name)
        yield Usage(kernel=kernel, architecture=architecture, registers=registers, stack=stack, spills=stored + loaded)


def _kernel_of(mangled: str) -> str:
    """Return the kernel whose name is in a mangled name, in which each name follows its length."""
    for kernel in REGISTERS:
        if f"{len(kernel)}{kernel}" in mangled:
            return kernel
    return mangled


def faults(usage: Usage) -> list[str]:
    """Return in words what is above the budget."""
    where = f"{usage.kernel} on {usage.architecture}"
    if usage.kernel not in REGISTERS:
        return [f"{where} has no budget of registers in {Path(__file__).name}"]
    found = []
    if usage.registers > REGISTERS[usage.kernel]:
        found.append(f"{where} takes {usage.registers} registers, above {REGISTERS[usage.kernel]}")
    if usage.spills:
        found.append(f"{where} spills {usage.spills} bytes")
    if usage.stack:
        found.append(f"{where} keeps {usage.stack} bytes in local memory")
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda source: compile_source(source, Path(folder)), SOURCES)
        found = []
        for usage in [u for printed in outputs for u in usages(printed)]:
            print(f"{usage.kernel:24} {usage.architecture:7} {usage.registers:3} registers")
            found += faults(usage)
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
