"""policy_loss, forward and backward, against the same formula in eager PyTorch."""

from collections.abc import Iterable
from typing import Any

import timing
import torch

from fastrl_fast.ops import policy_loss, reference

CALL = "ours, one token"
"""What torch asks for a call of an operator and its backward, however little it computes."""


def make(
    setting: timing.Setting, sequences: int, length: int, *, reference_logprobs: bool
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    options: dict[str, Any] = {"generator": torch.Generator(setting.device).manual_seed(0), "device": setting.device}
    n = sequences * length
    logprobs = -torch.rand(n, **options)
    names = ["old_logprobs", "rollout_logprobs", *(["ref_logprobs"] if reference_logprobs else [])]
    optional = {name: logprobs + 0.2 * torch.randn(n, **options) for name in names}
    advantages, weights = torch.randn(sequences, **options), torch.full((sequences,), 1 / n, device=setting.device)
    cu_targets = torch.arange(0, n + 1, length, device=setting.device)
    return logprobs.requires_grad_(), (advantages, weights, cu_targets), optional


def case(setting: timing.Setting, name: str, **settings: Any) -> timing.Case:
    sequences, length = (4, 16) if setting.quick else (256, 1024) if setting.on_gpu else (64, 1024)
    with_reference = settings.get("kl_coef", 0) > 0
    tensors = make(setting, sequences, length, reference_logprobs=with_reference)

    def run(function: Any, tensors: Any = tensors) -> timing.Run:
        logprobs, rest, optional = tensors

        def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss, stats = function(logprobs, *rest, **optional, **settings)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            return loss.detach(), gradient, stats["ratio"] if isinstance(stats, dict) else stats.ratio

        return call

    def check(results: dict[str, Any]) -> None:
        for theirs in (result for name, result in results.items() if name != CALL):
            for x, y in zip(results["ours"], theirs, strict=True):
                torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-9)

    return timing.Case(
        name=f"{name} {sequences} x {length}",
        runs={
            "ours": run(policy_loss),
            "torch eager": run(reference.policy_loss),
            **{name: run(f) for name, f in timing.compiled(reference.policy_loss, setting).items()},
            CALL: run(policy_loss, make(setting, 1, 1, reference_logprobs=with_reference)),
        },
        check=check,
        wanted={} if setting.device == "cuda" else {"torch eager": 3.0},
        bytes=sequences * length * 4 * (2 + len(tensors[-1])),
    )


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    yield case(setting, "grpo")
    yield case(setting, "grpo with kl", kl_coef=0.01)
    yield case(setting, "gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    yield case(setting, "cispo", clip="cispo", clip_low=1.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
