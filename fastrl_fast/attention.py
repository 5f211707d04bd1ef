"""Our attention as transformers' models call it: over packed rows, whose borders it keeps."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .ops.packed_attention import packed_attention
from .ops.prefix_attention import PrefixPlan, prefix_attention

PACKED = "fastrl_packed"
"""Name of our attention in transformers' registry."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_segments: Any = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    if packed_segments is None:
        raise ValueError(
            "model.path: models that do not pass keyword arguments on to their attention are not supported"
        )
    if s_aux is not None:
        raise ValueError("model.path: models with attention sinks are not supported")
    if isinstance(packed_segments, PrefixPlan):
        out = prefix_attention(
            query, key, value, packed_segments, scale=scaling, window=sliding_window, softcap=softcap
        )
        return out, None
    assert softcap is None, "rows of a model with capped scores are planned for prefix_attention"
    return packed_attention(query, key, value, packed_segments, scale=scaling, window=sliding_window), None


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


def check_no_leak(config: Any) -> None:
    """Raise ValueError for layers that mix positions by other means than our attention and so know no borders."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"model.path: layer_types must be full_attention or sliding_attention, got {sorted(kinds)}")
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        raise ValueError(f"model.path: attention_chunk_size must be none, got {chunk}")
