"""How much memory a rank will need, part by part and each with its formula: for planning, before anything is loaded."""

from dataclasses import dataclass
from typing import Literal

from .config import Config
from .ops.logit_slabs import LIMITS

When = Literal["always", "sampling", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a model decides on memory.

    `parameters` counts tied weights once; `layer` is the largest layer's; `query` and `key_value` are heads x head
    size; `query_norm`: queries and keys are normalised, as in Qwen3.
    """

    parameters: int
    layer: int
    layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int
    query_norm: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes on every rank, at what time, and where the number comes from."""

    what: str
    size: float
    formula: str
    when: When = "always"


def parts(config: Config, sizes: Sizes, *, ranks: int, longest: int, tokens: int, device: str) -> list[Part]:
    """The parts at their largest. `longest` is the tokens of the longest sequence there may be, `tokens` those of all
    sequences of an update over all ranks; `device`: "cpu" or "cuda".

    Letters of the formulas: P parameters, R ranks, b bytes of model.dtype, L layers, H hidden size, I intermediate
    size, Q and K heads x head size of queries and of keys, T tokens of a micro-batch. Left out: what the allocator
    wastes, temporaries of single operators, and CUDA's own (about 0.5 GiB).
    """
    b = 2 if config.model.dtype == "bfloat16" else 4
    p, per_rank = sizes.parameters, -(-tokens // ranks)
    t = max(longest, min(config.updates.tokens_per_microbatch, per_rank))
    sharded = ranks > 1 or b == 2
    found = [
        Part("weights, gradients, AdamW's moments", 16 * p / ranks, "16 P / R"),
        Part("the sampler's weights", b * p, "b P"),
    ]
    if config.loss.kl_coef > 0:
        found.append(Part("the reference's weights", 4 * p / ranks, "4 P / R"))
    cache = 2 * sizes.layers * sizes.key_value * b * config.rollout.tokens_per_batch
    found.append(Part("keys and values", cache, "2 L K b rollout.tokens_per_batch", "sampling"))
    if sharded:
        root = p - sizes.layers * sizes.layer
        found.append(
            Part("gathered weights", b * (root + 2 * sizes.layer), "b (P outside layers + 2 layers)", "update")
        )
        if per_rank > t:
            found.append(Part("gradients until the last micro-batch", 4 * p, "4 P", "update"))
    found.append(_activations(config, sizes, t, b))
    slab = LIMITS["cuda" if device == "cuda" else "cpu"].elements * 4
    head = (2 * b + 4) * sizes.hidden * t + slab
    found.append(Part("last layer", head, "(2 b + 4) H T + one slab of logits", "update"))
    return found


def _activations(config: Config, sizes: Sizes, t: int, b: int) -> Part:
    """What the backward pass keeps of the layers: per token, two norms with their float32 copies, the inputs of the
    matrices, the MLP's products, and what attention gives and takes."""
    whole = (4 * b + 8) * sizes.hidden + 4 * b * sizes.intermediate + 3 * b * sizes.query + 2 * b * sizes.key_value
    text = "((4 b + 8) H + 4 b I + 3 b Q + 2 b K) T"
    if sizes.query_norm:
        whole += (b + 4) * (sizes.query + sizes.key_value)
        text = "((4 b + 8) H + 4 b I + (4 b + 4) Q + (3 b + 4) K) T"
    if config.model.activation_checkpointing:
        return Part("activations", (sizes.layers * b * sizes.hidden + whole) * t, f"L b H T + {text}", "update")
    return Part("activations", sizes.layers * whole * t, f"L {text}", "update")


def peak(found: list[Part]) -> float:
    """Bytes at the worst moment: sampling and updates take turns."""
    total = {when: sum(part.size for part in found if part.when == when) for when in ("always", "sampling", "update")}
    return total["always"] + max(total["sampling"], total["update"])
