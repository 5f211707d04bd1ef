"""packed_logprobs against the best PyTorch a colleague would write: no-grad scoring, and loss with gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from fastrl_fast.ops import packed_logprobs

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


def cases() -> Iterable[timing.Case]:
    yield scoring(256, 896, 32768, torch.float32, 1.5)
    yield scoring(256, 896, 32768, torch.bfloat16, 4.0)
    yield scoring(512, 896, 151936, torch.float32, 1.35)
    yield scoring(512, 896, 151936, torch.bfloat16, 4.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
