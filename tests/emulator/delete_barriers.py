"""Delete each barrier of each CUDA kernel in turn and show that a check fails: `python delete_barriers.py [KERNEL]`.

A voting barrier is replaced by the thread's own vote. Exit status 1 if a kernel passes every check without one of its
barriers: either the barrier is not needed, or the checks are too weak.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from build import HERE, KERNELS, OPERATORS, build, sanitizer_environment

RUNS = (("tsan", "0"), ("plain", "0"), ("plain", "1"), ("plain", "2"))
"""Build and seed; the first has seen every deletion so far."""
BARRIER = re.compile(r"__sync(?:threads|warp)(?:_\w+)?\b(?=\()")


def without_each_barrier(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each barrier and the source without it."""
    for barrier in BARRIER.finditer(source):
        # `void(...)` takes no argument away from a plain barrier, `bool(...)` keeps the vote of a voting one
        instead = "bool" if "_" in barrier.group().removeprefix("__") else "void"
        line = source.count("\n", 0, barrier.start()) + 1
        yield line, source[: barrier.start()] + instead + source[barrier.end() :]


def caught_by(kernel: Path, changed: str, folder: Path, runs: Sequence[tuple[str, str]] = RUNS) -> str:
    """Return how the checks notice the changed kernel, or nothing."""
    copy = folder / kernel.name
    copy.write_text(changed)
    sources = [OPERATORS, *[copy if k == kernel else k for k in KERNELS]]
    for mode, seed in runs:
        library = build(mode, folder, sources)
        done = subprocess.run(
            [sys.executable, HERE / "checks.py", library, kernel.stem, "--seeds", seed],
            env=sanitizer_environment(mode), capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return f"{mode}, seed {seed}: {_reason(done.stderr)}"
    return ""


def _reason(stderr: str) -> str:
    for line in stderr.splitlines():
        if "ThreadSanitizer: " in line or line.startswith("emulator: "):
            return line[:100]
    return (stderr.strip().splitlines() or ["no message"])[-1][:100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", default=[k.stem for k in KERNELS], help="names of .cu files")
    chosen = parser.parse_args().kernels
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for kernel in (k for k in KERNELS if k.stem in chosen):
            unchanged = caught_by(kernel, kernel.read_text(), Path(folder), RUNS[:1])
            assert not unchanged, f"{kernel.name} fails as it is: {unchanged}"
            for line, changed in without_each_barrier(kernel.read_text()):
                reason = caught_by(kernel, changed, Path(folder))
                survivors += not reason
                print(f"{kernel.name}:{line} without its barrier: {reason or 'NOTHING FAILED'}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
