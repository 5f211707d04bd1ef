"""Load the compiled module `_fastrl_fast` and open the operator library `torch.ops.fastrl_fast`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch  # before the compiled module: its OpenMP runtime must be the one torch has loaded

CURE = "run `pip install .` again in the checkout of fastrl_fast"
INTERFACE = 3  # the same number as kInterface in csrc/bindings.cpp


def load_kernels() -> Any:
    """Import `_fastrl_fast` and compare its interface number with this source tree's.

    Raises:
        ImportError: the module is missing, or was built from other sources than these.
    """
    try:
        import _fastrl_fast
    except ImportError as error:
        raise ImportError(f"the compiled module _fastrl_fast cannot be imported ({error}): {CURE}") from error
    built = getattr(_fastrl_fast, "INTERFACE", None)
    if built != INTERFACE:
        raise ImportError(
            f"the compiled module {_fastrl_fast.__file__} has kernel interface {built}, "
            f"this source tree needs {INTERFACE}: {CURE}"
        )
    return _fastrl_fast


kernels = load_kernels()
library = torch.library.Library("fastrl_fast", "DEF")


def check(holds: bool, message: str) -> None:
    """Raise ValueError(message) unless `holds`: for what a caller can mend."""
    if not holds:
        raise ValueError(message)


def forbid_second_derivative(backward: str) -> None:
    """Make differentiating what operator `backward` returns a RuntimeError: torch alone warns and goes on with 0."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{backward} has no derivative: fastrl_fast differentiates once")

    torch.library.register_autograd(f"fastrl_fast::{backward}", refuse, lib=library)


@contextmanager
def cuda_stream(tensor: torch.Tensor) -> Iterator[int]:
    """Make the device of `tensor` current and yield the cudaStream_t that its kernels go to.

    Raises:
        RuntimeError: the compiled module holds no CUDA kernels.
    """
    if not kernels.CUDA:
        raise RuntimeError("fastrl_fast was built without CUDA kernels: run `FASTRL_CUDA=ON pip install .`")
    with torch.cuda.device(tensor.device):
        yield torch.cuda.current_stream().cuda_stream
