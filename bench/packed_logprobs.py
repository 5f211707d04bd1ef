"""packed_logprobs against the best PyTorch a colleague would write: no-grad scoring, and loss with gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastrl_fast.ops import fused_policy_loss, packed_logprobs, policy_loss

CHUNK = 128
"""Rows a colleague's chunked version holds logits of; measured best of 64 to 512 on two cores."""


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, in float32 from there on."""
    logits = F.linear(hidden, weight).float()
    log_p = torch.log_softmax(logits, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def selective(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Logits of a chunk of rows, target minus logsumexp: no entropy."""
    parts = []
    for h, y in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        logits = F.linear(h, weight).float()
        parts.append(logits.gather(-1, y[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(parts), None


def make(t: int, h: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(t, h, generator=generator) / h**0.5 * 2).to(dtype)
    weight = torch.randn(v, h, generator=generator).to(dtype)
    return hidden, weight, torch.randint(v, (t,), generator=generator)


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


def scoring(t: int, h: int, v: int, dtype: torch.dtype, wanted: float) -> timing.Case:
    hidden, weight, targets = make(t, h, v, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2

    def no_grad(run: Callable[..., Any], **options: Any) -> timing.Run:
        return torch.no_grad()(lambda: run(hidden, weight, targets, **options))

    return timing.Case(
        name=f"score T={t} H={h} V={v} {str(dtype).removeprefix('torch.')}",
        runs={
            "ours": no_grad(packed_logprobs),
            "ours, no entropy": no_grad(lambda *a: (packed_logprobs(*a, entropy=False)[0], None)),
            "torch, with entropy": no_grad(whole),
            "torch chunks, no entropy": no_grad(selective),
        },
        check=close(tolerance),
        wanted={"torch chunks, no entropy": wanted},
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

    parts = zip(hidden.split(4 * CHUNK), targets.split(4 * CHUNK), advantages.split(4 * CHUNK), strict=True)
    return sum(checkpoint(part, *p, use_reentrant=False) for p in parts) / len(hidden)


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    cu = torch.arange(len(targets) + 1)
    return fused_policy_loss(hidden, weight, targets, advantages, torch.full_like(advantages, 1 / len(targets)), cu)[0]


def recomputed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    logprobs, _ = packed_logprobs(hidden, weight, targets)
    cu = torch.arange(len(targets) + 1)
    return policy_loss(logprobs, advantages, torch.full_like(advantages, 1 / len(targets)), cu)[0]


def training(t: int, h: int, v: int, dtype: torch.dtype, wanted: float) -> timing.Case:
    hidden, weight, targets = make(t, h, v, dtype)
    advantages = torch.randn(t, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    weight.requires_grad_()

    def gradient(loss: Callable[..., Tensor]) -> timing.Run:
        def run() -> tuple[Tensor, ...]:
            value = loss(hidden, weight, targets, advantages)
            return (value.detach(), *torch.autograd.grad(value, (hidden, weight)))

        return run

    return timing.Case(
        name=f"loss and gradient T={t} H={h} V={v} {str(dtype).removeprefix('torch.')}",
        runs={
            "ours, fused": gradient(fused_loss),
            "ours, recomputed": gradient(recomputed_loss),
            "torch eager": gradient(eager_loss),
            "torch chunks": gradient(chunked_loss),
        },
        check=close(1e-4 if dtype == torch.float32 else 5e-2),
        wanted={"torch eager": wanted, "torch chunks": wanted},
    )


def cases() -> Iterable[timing.Case]:
    yield scoring(256, 896, 32768, torch.float32, 1.5)
    yield scoring(256, 896, 32768, torch.bfloat16, 4.0)
    yield scoring(512, 896, 151936, torch.float32, 1.35)
    yield scoring(512, 896, 151936, torch.bfloat16, 4.0)
    yield training(4096, 64, 8192, torch.float32, 2.0)
    yield training(4096, 576, 49152, torch.float32, 1.2)
    yield training(512, 896, 151936, torch.float32, 1.05)
    yield training(1024, 576, 49152, torch.bfloat16, 20.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
