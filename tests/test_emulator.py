"""CUDA sources on the CPU (tests/emulator/README.md): values, sanitizers, planted faults, and their callers."""

import ctypes
import importlib
import itertools
import math
import mmap
import platform
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_at_most_twice

from fastrl_fast.ops import (
    CHOICES,
    PRESETS,
    choose_rollouts,
    gradient_sketch,
    group_advantage,
    group_fidelity,
    logit_chunks,
    logit_slabs,
    reference,
    select_diverse,
    selection,
)
from fastrl_fast.ops._lib import kernels as compiled
from fastrl_fast.ops.loss_settings import RATIO_KINDS

EMULATOR = Path(__file__).parent / "emulator"
sys.path.insert(0, str(EMULATOR))

import checks  # noqa: E402
import choices  # noqa: E402
from build import build, runtime_of, sanitizer_environment  # noqa: E402
from faults import FAULTS  # noqa: E402
from library import Library  # noqa: E402

# The modules; `ops` holds the functions of the same names.
packed_logprobs = importlib.import_module("fastrl_fast.ops.packed_logprobs")
fused_policy_losses = importlib.import_module("fastrl_fast.ops.fused_policy_loss")
choices_of_rollouts = importlib.import_module("fastrl_fast.ops.choose_rollouts")
gradient_sketches = importlib.import_module("fastrl_fast.ops.gradient_sketch")
policy_losses = importlib.import_module("fastrl_fast.ops.policy_loss")
group_advantages = importlib.import_module("fastrl_fast.ops.group_advantage")
STREAM = 77

if shutil.which("g++") is None:
    pytest.skip("the emulator needs g++", allow_module_level=True)
if platform.machine() != "x86_64":
    pytest.skip("the emulator switches stacks on x86-64 only", allow_module_level=True)
if not all(Path(runtime_of(mode)).is_absolute() for mode in ("asan", "tsan")):
    pytest.skip("g++ came without libasan or libtsan", allow_module_level=True)

SCHEDULES = pytest.mark.parametrize("schedule", checks.SCHEDULES, ids=lambda s: f"seed {s['seed']}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(scope="module")
def library(folder):
    return Library(build("plain", folder))


def run_python(mode, script, *arguments):
    command = [sys.executable, str(EMULATOR / script), *map(str, arguments)]
    return subprocess.run(command, env=sanitizer_environment(mode), capture_output=True, text=True)


# --- values ------------------------------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("check", [*itertools.chain(*checks.CHECKS.values())], ids=lambda c: c.__name__)
def test_against_float64_and_sets(library, check, schedule):
    library.configure(**schedule)
    check(library)


@SCHEDULES
@pytest.mark.parametrize("preset", PRESETS)
def test_group_advantage_has_the_bits_of_the_cpu(library, preset, schedule):
    library.configure(**schedule)
    p = PRESETS[preset]
    for sizes in checks.GROUP_SIZES:
        rewards, cu = checks.reward_case(sizes)
        rewards = rewards + torch.rand(len(rewards), dtype=torch.float64).numpy() * (rewards != 0.1)
        here, dead = group_advantage(torch.from_numpy(rewards), torch.from_numpy(cu), preset=preset)
        there, dead_there = library.group_advantage(
            rewards, cu, divide_by_std=p.divide_by_std, leave_one_out=p.leave_one_out, ddof=p.ddof, eps=p.eps
        )
        assert torch.equal(here, torch.from_numpy(there)) and torch.equal(dead, torch.from_numpy(dead_there))


@SCHEDULES
@pytest.mark.parametrize("rule", ["mdap", "mdap_seed"])
def test_selection_is_that_of_the_cpu(library, rule, schedule):
    library.configure(**schedule)
    rollouts = checks.Rollouts(5, groups=[16, 8, 33], most_tokens=300, vocabulary=60)
    arguments = rollouts.arguments()
    for tau, ngram in ((0.8, 1), (0.35, 1), (0.2, 2), (0.05, 4)):
        here = select_diverse(*map(torch.from_numpy, arguments), rule=rule, tau=tau, ngram=ngram)
        there = library.select_diverse(*arguments, tau=round(tau * 10**6), ngram=ngram, seed_only=rule == "mdap_seed")
        assert 0 < int(here[0].sum()) < len(rollouts.classes)
        for x, y in zip(here, there, strict=True):
            assert torch.equal(x, torch.from_numpy(y))


@SCHEDULES
def test_gradient_sketch_has_the_bits_of_the_cpu(library, schedule):
    library.configure(**schedule)
    tokens, logprobs, cu = checks.sketch_case([3, 700, 0, 256, 999], 1)
    here = gradient_sketch(*map(torch.from_numpy, (tokens, logprobs, cu)), width=128, seed=3)
    assert torch.equal(here, torch.from_numpy(library.gradient_sketch(tokens, logprobs, cu, width=128, seed=3)))


@SCHEDULES
@pytest.mark.parametrize("rule", CHOICES)
def test_choose_rollouts_has_the_bits_of_the_cpu(library, rule, schedule):
    library.configure(**schedule)
    for sizes, width in choices.CASES:
        vectors, advantages, cu = choices.choice_case(sizes, width, 0)
        vectors = vectors * np.float32(1 / 3)  # products and sums are rounded
        tensors = [torch.from_numpy(x) for x in (vectors, advantages, cu)]
        for k in (0, 3, 20):
            here = choose_rollouts(*tensors, rule=rule, k=k, seed=11)
            number, fewer = CHOICES.index(rule), min(k, len(vectors))
            there = library.choose_rollouts(vectors, advantages, cu, rule=number, k=fewer, seed=11)
            for x, y in zip((here.weights, here.order, here.fidelity), there, strict=True):
                assert torch.equal(x, torch.from_numpy(y))
            weights = here.weights * 0.7
            fidelity = group_fidelity(*tensors[:2], weights, tensors[2])
            given = {"rule": len(CHOICES), "k": 0, "seed": 0, "weights": weights.numpy()}
            assert torch.equal(fidelity, torch.from_numpy(library.choose_rollouts(vectors, advantages, cu, **given)[2]))


def test_the_order_of_threads_changes_no_bit(library):
    results = []
    for schedule in checks.SCHEDULES:
        library.configure(**schedule)
        logits = checks.Logits(3, [300, 2049, 5], 3.0, forbidden=False)
        results.append(torch.from_numpy(checks.folded(library, logits)))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_offsets_above_32_bits(library):
    """K08: two rows that lie 2^31 floats apart; of the memory in between no page is touched."""
    stride, cols = 2**31 + 8, 5
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    memory = np.frombuffer(mmap.mmap(-1, 4 * (stride + cols), flags=reserve), np.float32)
    memory[:cols], memory[stride:] = np.arange(5), 3 * np.arange(5)
    targets, sums = np.array([1, 4]), np.zeros((4, 2), np.float32)
    sums[0] = -np.inf
    library.call("logit_fold_cuda", memory, 2, cols, stride, 0, targets, 1.0, *sums)
    assert sums[0].tolist() == [4, 12] and sums[3].tolist() == [1, 12]
    np.testing.assert_allclose(sums[1], [np.exp(np.arange(5) - 4.0).sum(), np.exp(3 * np.arange(5) - 12.0).sum()], 1e-6)
    zero = np.zeros(2, np.float32)
    per_row = (sums[0], np.log(sums[1]), zero, np.ones(2, np.float32), zero)
    library.call("logit_grad_cuda", memory, 2, cols, stride, 0, targets, 1.0, *per_row, None)
    for row in (memory[:cols], memory[stride:]):
        assert abs(row.sum()) < 1e-6 and (row != 0).all()


# --- the Python that calls the kernels -----------------------------------------------------------------------------


class Kernels:
    """The compiled module as fastrl_fast.ops knows it, with the emulated CUDA kernels."""

    gradient_sketch_cpu = staticmethod(compiled.gradient_sketch_cpu)
    choose_rollouts_cpu = staticmethod(compiled.choose_rollouts_cpu)

    CUDA = True
    POLICY_LOSS_STATS = 10

    def __init__(self, library):
        self.library, self.called = library, set()

    def _call(self, name, *arguments):
        *arguments, stream = arguments
        assert stream == STREAM, "the stream of the tensors' device"
        self.called.add(name)
        self.library.call(name, *arguments)

    def logit_fold_cuda(self, *arguments):
        self._call("logit_fold_cuda", *arguments)

    def logit_grad_cuda(self, *arguments):
        self._call("logit_grad_cuda", *arguments)

    def select_diverse_cuda(self, *arguments):
        ngram_at = 7
        self._call("select_diverse_cuda", *arguments[:ngram_at], ctypes.c_int(arguments[ngram_at]), *arguments[8:])

    def select_diverse_workspace(self, tokens, rollouts):
        return 5 * tokens + rollouts

    def gradient_sketch_cuda(self, *arguments):
        self._call("gradient_sketch_cuda", *arguments)

    def choose_rollouts_workspace(self, *sizes):
        return self.library.choose_rollouts_workspace(*sizes)

    def choose_rollouts_cuda(self, *arguments):
        rule_at = 6
        self._call("choose_rollouts_cuda", *arguments[:rule_at], ctypes.c_int(arguments[rule_at]), *arguments[7:])

    def policy_loss_cuda(self, *arguments):
        typed = [*arguments[:11], *map(ctypes.c_int, arguments[11:14]), *map(ctypes.c_double, arguments[14:18])]
        self._call("policy_loss_cuda", *typed, *arguments[18:])

    def group_advantage_cuda(self, rewards, cu, groups, divide_by_std, leave_one_out, ddof, eps, *rest):
        arguments = (rewards, cu, groups, divide_by_std, leave_one_out, ctypes.c_int(ddof), ctypes.c_double(eps))
        self._call("group_advantage_cuda", *arguments, *rest)


class CudaTensor(torch.Tensor):
    """A tensor on the CPU that says it is on CUDA, and so does what is made from it."""

    @property
    def is_cuda(self):
        return True


@pytest.fixture
def on_cuda(library, monkeypatch):
    """Send what is done to a CudaTensor to the emulated kernels, which are returned."""

    @contextmanager
    def cuda_stream(tensor):
        yield STREAM

    def mm(a, b, *, out_dtype=None, out=None):
        """torch.mm with the `out_dtype` that the CPU lacks: products of bfloat16 are exact in float32."""
        return torch_mm(a, b, out=out) if out_dtype is None else torch_mm(a.to(out_dtype), b.to(out_dtype), out=out)

    torch_mm = torch.mm
    library.configure(seed=1, resident=2)
    kernels = Kernels(library)
    for module in (logit_slabs, selection, group_advantages, policy_losses, gradient_sketches, choices_of_rollouts):
        monkeypatch.setattr(module, "kernels", kernels)
        monkeypatch.setattr(module, "cuda_stream", cuda_stream)
    monkeypatch.setattr(torch, "mm", mm)
    slabs = logit_slabs.SlabLimits(elements=16 * 27, rows=16, columns=100)  # several of rows and of columns
    monkeypatch.setitem(logit_slabs.LIMITS, "cpu", slabs)
    return kernels


def gradients(logprobs, hidden, weight, targets, upstream, settings, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    outputs = logprobs(*leaves, targets, dtype=dtype, **settings)
    return torch.autograd.grad(outputs, leaves, [u.to(outputs[0].dtype) for u in upstream])


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.3, "softcap": 5.0, "logit_scale": 0.5}], ids=["", "softcap"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_logprobs_with_the_cuda_kernels(on_cuda, dtype, settings):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 24, generator=make).to(dtype)
    weight = (torch.randn(303, 24, generator=make) / math.sqrt(24)).to(dtype)
    targets = torch.randint(303, (37,), generator=make)
    upstream = torch.randn(2, 37, generator=make)
    head = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, **settings, "ignore_index": None}

    tensors = [x.as_subclass(CudaTensor) for x in (hidden, weight, targets)]
    *ours, row_max, log_sum = packed_logprobs._forward(*tensors, None, None, *head.values(), True)
    truth = reference.packed_logprobs(hidden, weight, targets, **settings)
    torchs = reference.packed_logprobs(hidden, weight, targets, dtype=torch.float32, **settings)
    for x, y, t in zip(ours, torchs, truth, strict=True):
        assert x.dtype == torch.float32
        assert_at_most_twice(x, y, t)  # the bfloat16 inputs are exact, whatever multiplies them

    saved = (row_max, log_sum, ours[1], [True, True, False])
    grads = packed_logprobs._backward(*tensors, None, None, *head.values(), *upstream, *saved)[:2]
    case = (reference.packed_logprobs, hidden, weight, targets, upstream, settings)
    for x, y, t in zip(grads, gradients(*case, dtype), gradients(*case, torch.float64), strict=True):
        assert x.dtype == dtype
        assert_at_most_twice(x, y, t)
    assert on_cuda.called == {"logit_fold_cuda", "logit_grad_cuda"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_policy_loss_with_the_cuda_kernels(on_cuda, dtype, monkeypatch):
    monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", 16)  # several chunks
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 24, generator=make).to(dtype)
    weight = (torch.randn(303, 24, generator=make) / math.sqrt(24)).to(dtype)
    targets, cu = torch.randint(303, (37,), generator=make), torch.tensor([0, 20, 21, 30, 37])
    advantages, weights = torch.tensor([1.0, -1.0, 0.0, 0.5]), torch.rand(4, generator=make)
    tensors = [x.as_subclass(CudaTensor) for x in (hidden, weight, targets)]
    *ours, grad_bias = fused_policy_losses._forward(
        *tensors, None, None, 1.0, None, 1.0, None, None, None, None, advantages, weights, cu,
        0, 0, 0, 0.2, 0.2, math.inf, 0.0, 0, 2.0, 0.0, [True, True, False],
    )  # fmt: skip

    def parts(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = reference.packed_logprobs(*leaves, targets, dtype=dtype)
        loss, _ = reference.policy_loss(logprobs, advantages.to(dtype), weights.to(dtype), cu)
        return [loss.detach(), logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]

    truth, torchs, low = parts(torch.float64), parts(torch.float32), parts(dtype)
    names = ("loss", "logprobs", "entropy", "statistics", "grad_hidden", "grad_weight")
    ours = [x for name, x in zip(names, ours, strict=True) if name != "statistics"]
    for x, y, t in zip(ours, [*torchs[:3], *low[3:]], truth, strict=True):
        assert_at_most_twice(x, y, t)
    assert grad_bias.numel() == 0
    assert on_cuda.called == {"logit_fold_cuda", "logit_grad_cuda", "policy_loss_cuda"}


def test_select_diverse_with_the_cuda_kernel(on_cuda):
    arguments = [torch.from_numpy(x) for x in checks.Rollouts(2, **checks.SELECTION_CASES[2]).arguments()]
    ours = selection._forward(*(x.as_subclass(CudaTensor) for x in arguments), True, 350_000, 2)
    for x, y in zip(ours, reference.select_diverse(*arguments, rule="mdap_seed", tau=0.35, ngram=2), strict=True):
        assert torch.equal(x, y)
    assert on_cuda.called == {"select_diverse_cuda"}


@pytest.mark.parametrize("ratio", RATIO_KINDS)
def test_policy_loss_with_the_cuda_kernel(on_cuda, ratio):
    arrays, cu = checks.policy_case([5, 300, 1, 0, 129, 7], np.float32, 0)
    tensors = [torch.from_numpy(x).as_subclass(CudaTensor) for x in (*arrays, cu)]
    settings = (RATIO_KINDS.index(ratio), 0, 2, 0.05, 0.1, math.inf, 0.3)
    ours = policy_losses._forward(*tensors, *settings)
    truth = checks.true_policy_loss(arrays, cu, checks.PolicySettings(*settings))
    for x, y in zip(ours, truth, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=2**-23, atol=1e-12)
    assert on_cuda.called == {"policy_loss_cuda"}


def test_gradient_sketch_with_the_cuda_kernel(on_cuda):
    case = [torch.from_numpy(x) for x in checks.sketch_case([3, 700, 256], 1)]
    expected = gradient_sketch(*case, width=128, seed=3)
    ours = gradient_sketches._forward(*(x.as_subclass(CudaTensor) for x in case), 128, 3)
    assert torch.equal(ours, expected) and on_cuda.called == {"gradient_sketch_cuda"}


def test_choose_rollouts_with_the_cuda_kernel(on_cuda):
    case = [torch.from_numpy(x) for x in choices.choice_case([9, 0, 20], 10, 1)]
    for number in range(len(CHOICES)):
        settings = (number, 100, 0, None)
        expected = torch.ops.fastrl_fast.choose_rollouts(*case, *settings)
        ours = choices_of_rollouts._forward(*(x.as_subclass(CudaTensor) for x in case), *settings)
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    assert on_cuda.called == {"choose_rollouts_cuda"}


def test_group_advantage_with_the_cuda_kernel(on_cuda):
    rewards, cu = map(torch.from_numpy, checks.reward_case([8, 3, 40]))
    ours, dead = group_advantages._cuda(rewards, cu, True, False, 1, 1e-6)
    truth, truly_dead = reference.group_advantage(rewards, cu, preset="fastrl")
    assert torch.equal(dead, truly_dead) and on_cuda.called == {"group_advantage_cuda"}
    torch.testing.assert_close(ours.double(), truth, rtol=2**-23, atol=1e-9)


# --- sanitizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_under_sanitizers(mode, folder):
    done = run_python(mode, "checks.py", build(mode, folder), "--seeds", 0, 1)
    assert done.returncode == 0, done.stderr[-3000:]


# --- the checks can fail -------------------------------------------------------------------------------------------

WRONG_SUMS = ""
CAUGHT = {
    "kNoBarrier": {"plain": WRONG_SUMS, "tsan": "data race"},
    "kNoSyncwarp": {"tsan": "data race"},
    "kSharedNotWritten": {"plain": WRONG_SUMS},
    "kLocalNotWritten": {"asan": WRONG_SUMS},
    "kGlobalPastEnd": {"asan": "heap-buffer-overflow"},
    "kSharedPastEnd": {"asan": "use-after-poison"},
    "kLocalPastEnd": {"asan": "out of bounds"},
    "kTwoWriters": {"tsan": "data race"},
    "kBlocksShareSum": {"plain": WRONG_SUMS, "tsan": "data race"},
    "kNeedsOtherBlock": {"plain": WRONG_SUMS, "tsan": "data race"},
    "kDivergentBarrier": {"plain": "divergent __syncthreads"},
    "kBarrierNotReached": {"plain": "exited"},
    "kShuffleAfterExit": {"plain": "names its lane"},
    "kShuffleFromOutsideMask": {"plain": "reads lane"},
    "kFullMaskInBranch": {"plain": "deadlock"},
    "kIndexOverflow": {"asan": "signed integer overflow"},
    "kMisaligned": {"asan": "misaligned address"},
}
"""Which builds see which mistake of faults.cu, and what they say of it (nothing where only the sums are wrong)."""


@pytest.fixture(scope="module")
def faulty(folder):
    return {mode: build(mode, folder / "faults", [EMULATOR / "faults.cu"]) for mode in ("plain", "asan", "tsan")}


def test_without_a_fault_nothing_is_reported(faulty):
    assert {"kNone", *CAUGHT} == set(FAULTS)
    for mode, path in faulty.items():
        done = run_python(mode, "faults.py", path, "kNone", 1)
        assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.parametrize(("fault", "mode"), [(fault, mode) for fault, modes in CAUGHT.items() for mode in modes])
def test_a_planted_fault_is_seen(faulty, fault, mode):
    done = run_python(mode, "faults.py", faulty[mode], fault, 1)
    assert done.returncode != 0 and CAUGHT[fault][mode] in done.stderr, done.stderr
    if CAUGHT[fault][mode] == WRONG_SUMS:
        assert done.stderr == "", done.stderr


def test_a_faulty_launch_is_an_error(faulty):
    emulated = ctypes.CDLL(str(faulty["plain"]))
    assert emulated.sum_of_blocks(FAULTS.index("kNone"), None, None, 0) != 0, "a grid of no blocks"


@pytest.mark.slow
def test_deleting_any_barrier_makes_a_check_fail():
    done = run_python("plain", "delete_barriers.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("without its barrier") >= 27, done.stdout
