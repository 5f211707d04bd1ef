"""Other libraries as baselines and referees, where they are installed: `pip install '.[reference]'`, and verl.

verl's functions can only be imported with ray, tensordict and hydra-core beside it.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor


def load(module: str) -> Any | None:
    """The module, or None after saying why it cannot be had."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print(f"without {module}: {error}")
        return None


def trl_chunked(*, entropy: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None:
    """TRL's ChunkedLogProbFunction with the chunk that its trainers take."""
    utils = load("trl.trainer.utils")
    if utils is None:
        return None

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs = ("entropy",) if entropy else ()
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        return utils._ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, chunk, None, 1.0, outputs
        )[:2]  # fmt: skip

    return logprobs


def liger_loss(*, sequences: int, rows: int, compiled: bool) -> Callable[..., Tensor] | None:
    """Liger's fused GRPO loss on policy, of sequences of one length, in chunks of about `rows` tokens."""
    losses = load("liger_kernel.chunked_loss")
    if losses is None:
        return None

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        length = len(targets) // sequences
        function = losses.LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=compiled, use_ref_model=False, chunk_size=max(1, rows // length), loss_type="dapo"
        )
        ids, per_sequence = targets.view(sequences, length), advantages.view(sequences, length)[:, 0]
        return function(hidden.view(sequences, length, -1), weight, ids, targets.new_ones(ids.shape), per_sequence)[0]

    return loss


def verl_advantages(name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """One of verl's functions from the reward and the group of each rollout to its advantage."""
    algorithms = load("verl.trainer.ppo.core_algos")
    if algorithms is None:
        return None
    import numpy as np

    def advantages(rewards: Tensor, cu_group_sizes: Tensor) -> Tensor:
        sizes = cu_group_sizes.diff().numpy()
        index = np.repeat(np.arange(len(sizes)), sizes)
        scores = rewards[:, None].clone()
        return getattr(algorithms, name)(scores, scores.new_ones(scores.shape), index)[0][:, 0]

    return advantages
