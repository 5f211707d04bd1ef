"""Call the emulated CUDA operators with numpy arrays."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


POLICY_STATS = 10  # kPolicyLossStats


class PolicySettings(NamedTuple):
    """Of csrc/kernels/policy_loss.h; ratio, clip and kl as the numbers of their enums."""

    ratio: int
    clip: int
    kl: int
    low: float = 0.05
    high: float = 0.1
    dual: float = np.inf
    kl_coef: float = 0.3


class EmulatedError(RuntimeError):
    """A kernel did what is undefined or would hang; what exactly went to stderr."""


class Library:
    """The operators of a library made by `build`; arrays come back as the kernels left them."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.select_diverse_workspace.restype = ctypes.c_int64
        self._library.choose_rollouts_workspace.restype = ctypes.c_int64

    def configure(self, *, seed: int, resident: int = 1) -> None:
        """Run threads and blocks in order (seed 0) or in an order drawn from the seed; `resident` blocks interleave."""
        self._library.emulator_configure(ctypes.c_uint64(seed), resident)

    def call(self, name: str, *arguments: object) -> None:
        """Call a C function: arrays as pointers, int as int64, bool and float by value, None as a null pointer."""
        error = getattr(self._library, name)(*[_as_c(argument) for argument in arguments])
        if error:
            raise EmulatedError(f"{name} returned CUDA error {error}")

    def group_advantage(
        self, rewards: Array, cu: Array, *, divide_by_std: bool, leave_one_out: bool, ddof: int, eps: float
    ) -> tuple[Array, Array]:
        advantages, dead = np.full(len(rewards), np.nan, np.float32), np.zeros(len(cu) - 1, np.bool_)
        self.call(
            "group_advantage_cuda", rewards, cu, len(cu) - 1, divide_by_std, leave_one_out, ctypes.c_int(ddof),
            ctypes.c_double(eps), advantages, dead,
        )  # fmt: skip
        return advantages, dead

    def logit_fold(self, slab: Array, cols: int, start: int, targets: Array, scale: float, sums: Array) -> None:
        """Fold columns [0, cols) of slab [rows, stride] into sums [4, rows]: max, sum e^d, sum d e^d, target's z."""
        self.call("logit_fold_cuda", slab, len(slab), cols, slab.shape[1], start, targets, scale, *sums)

    def logit_grad(
        self, slab: Array, cols: int, start: int, targets: Array, scale: float, per_row: Sequence[Array], *, bf16: bool
    ) -> Array:
        """Return dx [rows, cols] float32; per_row holds row_max, log_sum, entropy and the two upstream gradients."""
        rows = len(slab)
        rounded = np.full((rows, cols), 0x7FFF, np.uint16) if bf16 else None
        self.call("logit_grad_cuda", slab, rows, cols, slab.shape[1], start, targets, scale, *per_row, rounded)
        if rounded is None:
            return slab[:, :cols]
        return (rounded.astype(np.uint32) << 16).view(np.float32)

    def gradient_sketch(self, tokens: Array, logprobs: Array, cu_seqlens: Array, *, width: int, seed: int) -> Array:
        sketch = np.full((len(cu_seqlens) - 1, width), np.nan, np.float32)
        arguments = (tokens, logprobs, len(tokens), cu_seqlens, len(sketch), width, seed, sketch)
        self.call("gradient_sketch_cuda", *arguments)
        return sketch

    def choose_rollouts_workspace(self, rule: int, rollouts: int, groups: int, width: int, k: int) -> int:
        sizes = (ctypes.c_int64(size) for size in (rollouts, groups, width, k))
        return self._library.choose_rollouts_workspace(rule, *sizes)

    def choose_rollouts(
        self,
        vectors: Array,
        advantages: Array,
        cu: Array,
        *,
        rule: int,
        k: int,
        seed: int,
        weights: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return weights, order and fidelity; rule as the number of its enum, `weights` for the rule `given`."""
        (rollouts, width), groups = vectors.shape, len(cu) - 1
        weights = np.full(rollouts, np.nan, np.float32) if weights is None else weights.copy()
        order, fidelity = np.full(rollouts, -7, np.int64), np.full(groups, np.nan)
        size = self.choose_rollouts_workspace(rule, rollouts, groups, width, k)
        workspace = np.full(size, np.nan)  # what an allocator would leave
        self.call(
            "choose_rollouts_cuda", vectors, advantages, rollouts, cu, groups, width, ctypes.c_int(rule), k, seed,
            weights, order, fidelity, workspace,
        )  # fmt: skip
        return weights, order, fidelity

    def policy_loss(self, tokens: Sequence[Array | None], cu: Array, settings: PolicySettings) -> tuple[Array, ...]:
        """Return loss [1], gradient [N] and statistics; tokens holds the seven arrays of PolicyLossArgs in order."""
        logprobs, sequences = tokens[0], len(cu) - 1
        assert logprobs is not None
        loss, stats, grad = np.full(1, np.nan), np.full(POLICY_STATS, np.nan), np.full_like(logprobs, np.nan)
        partial = np.full(sequences * (1 + POLICY_STATS), np.nan)
        self.call(
            "policy_loss_cuda", logprobs.dtype == np.float64, len(logprobs), *tokens, cu, sequences,
            *map(ctypes.c_int, (settings.ratio, settings.clip, settings.kl)),
            *map(ctypes.c_double, (settings.low, settings.high, settings.dual, settings.kl_coef)),
            partial, grad, loss, stats,
        )  # fmt: skip
        return loss, grad, stats

    def select_diverse(
        self,
        tokens: Array,
        cu_seqlens: Array,
        cu_groups: Array,
        classes: Array,
        *,
        tau: int,
        ngram: int,
        seed_only: bool,
    ) -> tuple[Array, Array]:
        """tau in millionths."""
        size = self._library.select_diverse_workspace(ctypes.c_int64(len(tokens)), ctypes.c_int64(len(classes)))
        workspace = np.full(size, 0x5A5A5A5A, np.int32)  # what an allocator would leave
        kept, representative = np.zeros(len(classes), np.bool_), np.full(len(classes), -7, np.int64)
        self.call(
            "select_diverse_cuda", tokens, len(tokens), cu_seqlens, cu_groups, len(cu_groups) - 1, classes, tau,
            ctypes.c_int(ngram), seed_only, workspace, kept, representative,
        )  # fmt: skip
        return kept, representative


def _as_c(argument: object) -> object:
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous, "a kernel takes rows back to back"
        return ctypes.c_void_p(argument.ctypes.data)
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, bool):
        return ctypes.c_bool(argument)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return argument
