"""The LM head as a module of its own, which answers with logprobs, never with logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BARRED_LOGIT = -1e4
"""Added to the logits of tokens that completions never hold: their probability is exactly 0, and so is its gradient."""


HeadFunction = Callable[..., Any]
"""Takes the arguments of `packed_logprobs`: it, or a loss made of it."""


class LogprobHead(nn.Module):
    """The LM head as a module of its own: under FSDP2 its weight is whole only inside its own forward."""

    bias: Tensor | None

    def __init__(
        self, output: nn.Linear, *, softcap: float | None, logit_scale: float, barred: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.weight = output.weight
        if barred:
            assert output.bias is None and softcap is None, "models that read images have plain heads"
            bias = torch.zeros(len(output.weight), device=output.weight.device)
            bias[list(barred)] = BARRED_LOGIT
            self.register_buffer("bias", bias, persistent=False)
        else:
            self.bias = output.bias
        self.softcap = softcap
        self.logit_scale = logit_scale

    def forward(
        self, hidden: Tensor, targets: Tensor, row_index: Tensor, temperature: float, evaluate: HeadFunction
    ) -> Any:
        """Return what `evaluate` makes of the weight."""
        return evaluate(
            hidden,
            self.weight,
            targets,
            row_index=row_index,
            bias=self.bias,
            temperature=temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
        )
