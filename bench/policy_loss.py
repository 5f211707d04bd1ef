"""policy_loss, forward and backward, against the same formula in eager PyTorch."""

from collections.abc import Iterable
from typing import Any

import timing
import torch

from fastrl_fast.ops import policy_loss, reference


def make(
    sequences: int, length: int, *, reference_logprobs: bool
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    n = sequences * length
    logprobs = -torch.rand(n, generator=generator)
    names = ["old_logprobs", "rollout_logprobs", *(["ref_logprobs"] if reference_logprobs else [])]
    optional = {name: logprobs + 0.2 * torch.randn(n, generator=generator) for name in names}
    advantages, weights = torch.randn(sequences, generator=generator), torch.full((sequences,), 1 / n)
    cu_targets = torch.arange(0, n + 1, length)
    return logprobs.requires_grad_(), (advantages, weights, cu_targets), optional


def case(name: str, sequences: int, length: int, *, wanted: float, **settings: Any) -> timing.Case:
    logprobs, rest, optional = make(sequences, length, reference_logprobs=settings.get("kl_coef", 0) > 0)

    def run(function: Any) -> timing.Run:
        def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss, stats = function(logprobs, *rest, **optional, **settings)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            return loss.detach(), gradient, stats["ratio"] if isinstance(stats, dict) else stats.ratio

        return call

    def check(results: dict[str, Any]) -> None:
        for theirs in results.values():
            for x, y in zip(results["ours"], theirs, strict=True):
                torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-9)

    return timing.Case(
        name=f"{name} {sequences} x {length}",
        runs={
            "ours": run(policy_loss),
            "torch eager": run(reference.policy_loss),
            "torch.compile": run(torch.compile(reference.policy_loss, dynamic=False)),
        },
        check=check,
        wanted={"torch eager": wanted},
    )


def cases() -> Iterable[timing.Case]:
    yield case("grpo", 64, 1024, wanted=3.0)
    yield case("grpo with kl", 64, 1024, wanted=3.0, kl_coef=0.01)
    yield case("gspo", 64, 1024, wanted=3.0, ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    yield case("cispo", 64, 1024, wanted=3.0, clip="cispo", clip_low=1.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
