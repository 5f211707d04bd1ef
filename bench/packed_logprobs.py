r"""packed_logprobs against the best PyTorch a colleague would write, TRL and Liger: scoring, and loss with gradient.

Its own products alone run beside it, and the GEMM as torch would call it once: what is left above them is what the
operator costs, and no ratio can be better than without it. On a CPU the
bfloat16 targets are for one without bf16 instructions, where torch's own bf16 GEMM is slow; any other can act as one:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) \
  python bench/packed_logprobs.py --threads 2 --only bfloat16  # its own cache: what bf16 was compiled to crashes
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import referees
import timing
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastrl_fast.ops import fused_policy_loss, logit_slabs, packed_logprobs, policy_loss

CHUNK = {"cpu": 128, "cuda": 2048}
"""Rows a colleague's chunked version holds logits of; measured best of 64 to 512 on two cores, and on a GPU enough to
keep the GEMM busy."""


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, in float32 from there on."""
    logits = F.linear(hidden, weight).float()
    log_p = torch.log_softmax(logits, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def selective(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Logits of a chunk of rows, target minus logsumexp: no entropy."""
    parts, chunk = [], CHUNK[hidden.device.type]
    for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = F.linear(h, weight).float()
        parts.append(logits.gather(-1, y[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(parts), None


def make(setting: timing.Setting, t: int, h: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(setting.device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": setting.device}
    hidden = (torch.randn(t, h, **options) / h**0.5 * 2).to(dtype)
    weight = torch.randn(v, h, **options).to(dtype)
    return hidden, weight, torch.randint(v, (t,), **options)


def close(tolerance: float) -> Callable[[dict[str, Any]], None]:
    def check(results: dict[str, Any]) -> None:
        first = next(iter(results.values()))
        for name, result in results.items():
            for ours, theirs in zip(first, result, strict=True):
                if theirs is not None and ours is not None:
                    scale = float(ours.abs().max()) + 1e-30
                    gap = float((ours.float() - theirs.float()).abs().max()) / scale
                    assert gap <= tolerance, f"{name} differs by {gap:.2e} of the largest value"

    return check


def operands(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What ours multiplies: float32 on a CPU, whose bfloat16 GEMM would round the logits."""
    return (hidden, weight) if hidden.is_cuda else (hidden.float(), weight.float())


PRODUCTS = "ours, its products alone"


def products_alone(run: timing.Run) -> timing.Run:
    """`run` of ours without its kernels on logits: what it leaves are the GEMMs, in its own slabs and order."""

    def products() -> tuple[None, ...]:
        with (
            mock.patch.object(logit_slabs, "fold", lambda *_: None),
            mock.patch.object(logit_slabs, "differentiate", lambda logits, *rest: logits.to(rest[-1])),
        ):
            return (None,) * len(run())

    return products


def one_gemm(hidden: Tensor, weight: Tensor) -> tuple[None, None]:
    torch.mm(hidden, weight.t())
    return None, None


def scoring(
    setting: timing.Setting, t: int, h: int, v: int, dtype: torch.dtype, wanted: dict[str, float]
) -> timing.Case:
    hidden, weight, targets = make(setting, t, h, v, dtype)
    runs: dict[str, Callable[..., Any]] = {
        "ours": packed_logprobs,
        "ours, no entropy": lambda *a: (packed_logprobs(*a, entropy=False)[0], None),
        "torch, with entropy": whole,
        "torch chunks, no entropy": selective,
    }
    runs |= timing.compiled(whole, setting)
    for name, entropy in (("TRL, with entropy", True), ("TRL, no entropy", False)):
        if (function := referees.trl_chunked(entropy=entropy)) is not None:
            runs[name] = function
    pair = operands(hidden, weight)
    runs[PRODUCTS] = lambda *_: products_alone(lambda: packed_logprobs(*pair, targets))()
    if not setting.quick:
        runs["one GEMM"] = lambda *_: one_gemm(*pair)
    return timing.Case(
        name=f"score T={t} H={h} V={v} {str(dtype).removeprefix('torch.')}",
        runs={name: torch.no_grad()(lambda f=f: f(hidden, weight, targets)) for name, f in runs.items()},
        check=close(1e-5 if dtype == torch.float32 else 5e-2),
        wanted=wanted,
        floor=PRODUCTS,
    )


def eager_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """The on-policy loss with all logits at once; the weights are 1 / T."""
    logits = F.linear(hidden, weight).float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    return (-advantages * (logprobs - logprobs.detach()).exp()).mean()


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """The same with each chunk of rows checkpointed: little memory, four GEMMs."""

    def part(h: Tensor, y: Tensor, a: Tensor) -> Tensor:
        logits = F.linear(h, weight).float()
        logprobs = logits.gather(-1, y[:, None])[:, 0] - logits.logsumexp(-1)
        return (-a * (logprobs - logprobs.detach()).exp()).sum()

    rows = 4 * CHUNK["cpu"] if hidden.device.type == "cpu" else CHUNK["cuda"]
    parts = zip(hidden.split(rows), targets.split(rows), advantages.split(rows), strict=True)
    return sum(checkpoint(part, *p, use_reentrant=False) for p in parts) / len(hidden)


def three_gemms(hidden: Tensor, weight: Tensor) -> tuple[None, None, None]:
    with torch.no_grad():
        logits = torch.mm(hidden, weight.t())
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)
    return None, None, None


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    cu = torch.arange(len(targets) + 1, device=targets.device)
    return fused_policy_loss(hidden, weight, targets, advantages, torch.full_like(advantages, 1 / len(targets)), cu)[0]


def recomputed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    logprobs, _ = packed_logprobs(hidden, weight, targets)
    cu = torch.arange(len(targets) + 1, device=targets.device)
    return policy_loss(logprobs, advantages, torch.full_like(advantages, 1 / len(targets)), cu)[0]


SEQUENCE = 32
"""Tokens that share an advantage."""


def training(
    setting: timing.Setting, t: int, h: int, v: int, dtype: torch.dtype, wanted: dict[str, float]
) -> timing.Case:
    hidden, weight, targets = make(setting, t, h, v, dtype)
    sequences = t // SEQUENCE
    advantages = torch.randn(sequences, generator=torch.Generator().manual_seed(1)).to(setting.device)
    advantages = advantages.repeat_interleave(SEQUENCE)
    hidden.requires_grad_()
    weight.requires_grad_()

    def gradient(loss: Callable[..., Tensor]) -> timing.Run:
        def run() -> tuple[Tensor, ...]:
            value = loss(hidden, weight, targets, advantages)
            return (value.detach(), *torch.autograd.grad(value, (hidden, weight)))

        return run

    losses: dict[str, Callable[..., Tensor]] = {
        "ours, fused": fused_loss,
        "ours, recomputed": recomputed_loss,
        "torch eager": eager_loss,
        "torch chunks": chunked_loss,
        **timing.compiled(eager_loss, setting),
    }
    liger = referees.liger_loss(sequences=sequences, rows=4 * CHUNK["cpu"], compiled=not setting.quick)
    if liger is not None:
        losses["Liger, fused GRPO"] = liger
    runs = {name: gradient(loss) for name, loss in losses.items()}
    pair = operands(hidden.detach(), weight.detach())
    leaves = [x.requires_grad_() for x in pair]
    runs[PRODUCTS] = products_alone(
        lambda: (None, *torch.autograd.grad(fused_loss(*leaves, targets, advantages), leaves))
    )
    if not setting.quick:
        runs["three GEMMs"] = lambda: three_gemms(*pair)
    return timing.Case(
        name=f"loss and gradient T={t} H={h} V={v} {str(dtype).removeprefix('torch.')}",
        runs=runs,
        check=close(1e-4 if dtype == torch.float32 else 5e-2),
        wanted=wanted,
        floor=PRODUCTS,
    )


def logit_kernels(setting: timing.Setting) -> Iterable[timing.Case]:
    """The two kernels alone on one slab, which memory bounds: each logit is read once, its gradient written once."""
    rows, columns = 8192, 8192
    options: dict[str, Any] = {"device": setting.device}
    logits, targets = torch.randn(rows, columns, **options), torch.arange(rows, **options)
    head = logit_slabs.Head(
        weight=logits, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, dtype=torch.float32
    )
    sums = logit_slabs.start(logits, torch.float32)
    logit_slabs.fold(logits, targets, 0, 1.0, sums)
    row_max, log_sum, logprobs, entropy = logit_slabs.finish(sums)
    grads = logit_slabs.Grads(
        row_max=row_max,
        log_sum=log_sum,
        entropy=entropy,
        logprobs=logprobs,
        upstream_entropy=torch.zeros_like(logprobs),
    )
    slopes = partial(logit_slabs.differentiate, logits, targets, 0, head, grads, torch.bfloat16)
    folds = partial(logit_slabs.fold, logits, targets, 0, 1.0, sums)
    for name, run, moved in (("fold", folds, 4), ("gradient in bfloat16", slopes, 6)):
        size = rows * columns * moved
        yield timing.Case(
            name=f"logit {name} {rows} x {columns}", runs={"ours": run}, check=lambda _: None, wanted={}, bytes=size
        )


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    if setting.quick:
        for dtype in (torch.float32, torch.bfloat16):
            yield scoring(setting, 64, 16, 301, dtype, {})
            yield training(setting, 64, 16, 301, dtype, {})
        return
    if setting.on_gpu:
        yield from logit_kernels(setting)
        for h, v in ((3584, 152064), (1536, 151936)):
            yield scoring(setting, 16384, h, v, torch.bfloat16, {"one GEMM": 1 / 1.1})
            yield training(setting, 16384, h, v, torch.bfloat16, {"three GEMMs": 1 / 1.15})
        return
    for t, v, dtype, ratio in (
        (256, 32768, torch.float32, 1.5),
        (256, 32768, torch.bfloat16, 4.0),
        (512, 151936, torch.float32, 1.35),
        (512, 151936, torch.bfloat16, 4.0),
    ):
        wanted = dict.fromkeys(("torch chunks, no entropy", "torch.compile"), ratio)
        yield scoring(setting, t, 896, v, dtype, wanted | ({"TRL, no entropy": 1.2} if t == 256 else {}))
    for t, h, v, dtype, ratio in (
        (4096, 64, 8192, torch.float32, 2.0),
        (4096, 576, 49152, torch.float32, 1.2),
        (512, 896, 151936, torch.float32, 1.05),
        (1024, 576, 49152, torch.bfloat16, 20.0),
    ):
        yield training(setting, t, h, v, dtype, dict.fromkeys(("torch eager", "torch chunks", "torch.compile"), ratio))


if __name__ == "__main__":
    timing.main(__doc__, cases)
