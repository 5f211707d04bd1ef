"""How tests of numerical code compare: with float64 truth, never worse than twice PyTorch at the same dtype, and the
kernels for any processor with those for this one."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor


def error(value: Tensor, truth: Tensor) -> float:
    """Return the largest absolute difference to `truth`, 0 for empty tensors; both must be finite."""
    assert value.shape == truth.shape, f"{value.shape} against {truth.shape}"
    assert bool(value.isfinite().all()), f"{int((~value.isfinite()).sum())} values are not finite"
    return float((value.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def assert_at_most_twice(ours: Tensor, torchs: Tensor, truth: Tensor, *, size: float | None = None) -> None:
    """Assert error(ours) <= 2 error(torchs), or one rounding of a number of `size` where PyTorch was lucky.

    `size` is the largest number the result is a difference or product of; without it the largest true value.
    """
    if size is None:
        size = float(truth.abs().max()) if truth.numel() else 0.0
    allowed = max(2 * error(torchs, truth), size * torch.finfo(ours.dtype).eps)
    assert error(ours, truth) <= allowed, f"error {error(ours, truth):.3e}, PyTorch's {error(torchs, truth):.3e}"


def run_with_scalar_code(script: str) -> str:
    """What Python code prints in a new process, whose kernels are those for any processor; it may import the tests."""
    return run_with(script, "scalar", FASTRL_FORCE_SCALAR="1")


def run_with(script: str, simd: str, **variables: str) -> str:
    """The same with these environment variables, by which the kernels must be those for `simd`."""
    first = (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from fastrl_fast.ops._lib import kernels\nassert kernels.SIMD == {simd!r}, kernels.SIMD\n"
    )
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", first + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
