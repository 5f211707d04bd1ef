"""Compile CUDA sources, unmodified, with g++ against the emulator's headers: plain, with ASan and UBSan, or TSan."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
EMULATOR = [HERE / "fiber.cpp", HERE / "block.cpp", HERE / "scheduler.cpp"]
OPERATORS = HERE / "operators.cpp"
KERNELS = sorted((CSRC / "kernels/cuda").glob("*.cu"))

SANITIZERS = {
    "plain": [],
    # a local that is read before it is written becomes NaN or a huge number
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-ftrivial-auto-var-init=pattern"],
    "tsan": ["-fsanitize=thread"],
}
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-fno-omit-frame-pointer", "-ffp-contract=off"]  # fmt: skip
INCLUDES = [f"-I{HERE / 'include'}", f"-I{HERE}", f"-I{CSRC}"]  # ours first: they stand in for the toolkit's headers


def build(mode: str, folder: Path, sources: Sequence[Path] = (OPERATORS, *KERNELS)) -> Path:
    """Return the library `folder`/MODE.so of CUDA sources and whatever calls them through a C interface.

    A source of which `folder` holds the object already, by its text, is not compiled again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(source, []) for source in EMULATOR] + [(source, SANITIZERS[mode]) for source in sources]
    objects = [folder / f"{mode}-{hashlib.sha256(source.read_bytes()).hexdigest()}.o" for source, _ in jobs]
    commands = [
        ["g++", *FLAGS, *INCLUDES, *sanitizer, "-x", "c++", "-c", str(source), "-o", str(out)]
        for (source, sanitizer), out in zip(jobs, objects, strict=True)
        if not out.exists()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    library = folder / f"{mode}.so"
    _run(["g++", "-shared", *SANITIZERS[mode], *map(str, objects), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def runtime_of(mode: str) -> str:
    """Return the path of the sanitizer's runtime, or its bare name where the compiler has none."""
    return subprocess.check_output(["g++", f"-print-file-name=lib{mode}.so"], text=True).strip()


def sanitizer_environment(mode: str) -> dict[str, str]:
    """Return the environment in which a Python that was built without a sanitizer can load a library of `mode`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONMALLOC": "malloc"}
    if mode != "plain":
        environment["LD_PRELOAD"] = runtime_of(mode)
    environment["ASAN_OPTIONS"] = "detect_leaks=0"
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    environment["TSAN_OPTIONS"] = "halt_on_error=1 report_bugs=1 ignore_noninstrumented_modules=1"
    return environment
