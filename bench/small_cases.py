"""Every operator once on small inputs, compared with the CPU: what compute-sanitizer watches.

python bench/small_cases.py [--device cuda]
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastrl_fast.ops import (
    CHOICES,
    PRESETS,
    choose_rollouts,
    fused_policy_loss,
    gradient_sketch,
    group_advantage,
    packed_logprobs,
    policy_loss,
    select_diverse,
)

GROUPS = torch.tensor([0, 5, 5, 6, 40])


def calls() -> Iterator[tuple[str, list[Tensor], Callable[..., tuple[Tensor, ...]]]]:
    """Name, inputs on the CPU, and the call that is made on either device."""
    make = torch.Generator().manual_seed(0)
    n = int(GROUPS[-1])
    rewards = torch.rand(n, generator=make)
    for preset in PRESETS:
        yield f"group_advantage {preset}", [rewards, GROUPS], lambda r, cu, p=preset: group_advantage(r, cu, preset=p)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 90, (n,), generator=make).cumsum(0)])
    tokens = torch.randint(0, 40, (int(cu_seqlens[-1]),), generator=make)
    logprobs = torch.rand(len(tokens), generator=make).log()
    classes = torch.randint(-1, 2, (n,), generator=make)
    yield "select_diverse", [tokens, cu_seqlens, GROUPS, classes], select_diverse
    yield "gradient_sketch", [tokens, logprobs, cu_seqlens], lambda *a: (gradient_sketch(*a, width=64),)
    vectors, advantages = torch.randn(n, 50, generator=make) + 1, torch.randn(n, generator=make)
    for rule in CHOICES:
        yield (
            f"choose_rollouts {rule}",
            [vectors, advantages, GROUPS],
            lambda *a, r=rule: choose_rollouts(*a, rule=r, k=9),
        )
    weights = torch.rand(n, generator=make)
    loss = [logprobs, advantages, weights, cu_seqlens]
    yield "policy_loss", loss, lambda *a: (lambda r: (r[0], *r[1]))(policy_loss(*a, old_logprobs=a[0] * 0.9))
    hidden, weight = torch.randn(len(tokens), 24, generator=make), torch.randn(301, 24, generator=make)

    def head(h: Tensor, w: Tensor, y: Tensor, a: Tensor, s: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
        h, w = h.requires_grad_(), w.requires_grad_()
        recomputed = policy_loss(packed_logprobs(h, w, y)[0], a, s, cu)[0]
        fused = fused_policy_loss(h, w, y, a, s, cu)[0]
        return (recomputed, fused, *torch.autograd.grad(recomputed + fused, (h, w)))

    yield "packed_logprobs and fused_policy_loss", [hidden, weight, tokens, advantages, weights, cu_seqlens], head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    for name, inputs, call in calls():
        here = call(*(x.clone() for x in inputs))
        there = call(*(x.clone().to(device) for x in inputs))
        for x, y in zip(here, there, strict=True):
            # a device's GEMM may sum in another order, and in TF32 where that is allowed
            torch.testing.assert_close(y.detach().cpu(), x.detach(), rtol=1e-3, atol=1e-3)
        print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main()
