"""nvcc takes every CUDA source for every architecture without a warning, a spill or too many registers."""

import shutil
from pathlib import Path

import ptxas_budget
import pytest
import torch
from ptxas_budget import ARCHITECTURES, SOURCES, Usage, compile_source, faults, usages

from fastrl_fast.ops._lib import kernels

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_within_the_budget(source, tmp_path):
    found = list(usages(compile_source(source, tmp_path)))
    kernels = source.read_text().count("__global__")
    assert len(found) >= kernels * len(ARCHITECTURES), "a kernel that ptxas said nothing of"
    assert {usage.architecture for usage in found} == {f"sm_{a}" for a in ARCHITECTURES}
    assert [fault for usage in found for fault in faults(usage)] == []


def test_every_budget_is_for_a_kernel():
    text = "".join(source.read_text() for source in SOURCES)
    assert all(f" {kernel}(" in text for kernel in ptxas_budget.REGISTERS)


def test_every_source_is_in_the_build():
    listed = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
    assert all(f"csrc/kernels/cuda/{source.name}" in listed for source in SOURCES)
    for flag in ("-lineinfo", "-fmad=false"):
        assert flag in listed and flag in ptxas_budget.FLAGS


BAD = {
    "declared but never referenced": "__global__ void logit_fold_kernel(float* x) { int unused; }",
    "local memory": """__global__ void logit_fold_kernel(float* x) {
        float local[64];
        for (int i = 0; i < 64; ++i) local[i] = x[i];
        for (int i = 0; i < 64; ++i) local[static_cast<int>(x[i]) & 63] += local[i];
        x[0] = local[threadIdx.x];
    }""",
    "spill": """__global__ void __launch_bounds__(1024, 2) logit_fold_kernel(float* x) {
        float all[80];
        #pragma unroll
        for (int i = 0; i < 80; ++i) all[i] = x[i];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 80; ++i) x[i + threadIdx.x] = all[i] * all[79 - i];
    }""",
}


@nvcc
@pytest.mark.parametrize("message", BAD)
def test_a_bad_kernel_is_seen(tmp_path, message):
    source = tmp_path / "bad.cu"
    source.write_text(BAD[message] + "\n")
    try:
        found = [fault for usage in usages(compile_source(source, tmp_path)) for fault in faults(usage)]
    except RuntimeError as error:
        found = [str(error)]
    assert any(message in fault.lower() for fault in found), found


def test_what_is_above_the_budget_is_named():
    inside = {"kernel": "logit_fold_kernel", "architecture": "sm_90", "registers": 40, "stack": 0, "spills": 0}
    assert faults(Usage(**inside)) == []
    assert "takes 41 registers, above 40" in faults(Usage(**{**inside, "registers": 41}))[0]
    assert "spills 8 bytes" in faults(Usage(**{**inside, "spills": 8}))[0]
    assert "no budget" in faults(Usage(**{**inside, "kernel": "another"}))[0]


def test_the_bindings_take_calls_without_rows():
    """They return before anything is launched, so that they show without a device that the signatures fit."""
    if not kernels.CUDA:
        pytest.skip("the module was built without CUDA")
    slab = (0, 0, 5, 5, 0, 0, 1.0)
    kernels.logit_fold_cuda(*slab, 0, 0, 0, 0, 0)
    kernels.logit_grad_cuda(*slab, 0, 0, 0, 0, 0, 0, 0)
    kernels.group_advantage_cuda(0, 0, 0, True, False, 1, 1e-6, 0, 0, 0)
    kernels.gradient_sketch_cuda(0, 0, 0, 0, 0, 64, 0, 0, 0)
    kernels.choose_rollouts_cuda(0, 0, 0, 0, 0, 64, 1, 4, 0, 0, 0, 0, 0, 0)
    assert kernels.choose_rollouts_workspace(2, 5, 1, 64, 4) == 5 * (9 + 2 * 4) + 2 * 64
    kernels.select_diverse_cuda(0, 0, 0, 0, 0, 0, 800_000, 1, False, 0, 0, 0, 0)
    assert kernels.select_diverse_workspace(7, 2) == 37
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="policy_loss: CUDA error"):  # it writes the loss even of no sequence
            kernels.policy_loss_cuda(False, 0, *[0] * 9, 0, 0, 0, 0.2, 0.2, 1e9, 0.1, 0, 0, 0, 0, 0)
