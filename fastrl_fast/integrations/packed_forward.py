"""A second forward pass for a transformers model that others train: packed rows in, logprobs out, prompts shared."""

import functools
import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from ..attention import PACKED
from ..ops import packed_logprobs
from ..ops.packed_attention import segments
from ..ops.prefix_attention import plan_prefixes
from ..packing import Sequence, pack, sharing_limit
from ..types import PackedBatch


def add_packed_forward(lm: PreTrainedModel, *, temperature: float) -> None:
    """Let `lm(packed=batch, entropy=True)` return (logprobs [N], entropy [N]) of a packed batch's targets, float32.

    Every other call, generation included, goes where it went before, with the attention that it had.
    """
    config = lm.config.get_text_config()
    lm.set_attn_implementation(_beside(lm.config._attn_implementation))
    settings: dict[str, Any] = dict(
        temperature=temperature,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
    )
    original = lm.forward

    # With its signature: generate() looks up there what a model takes.
    @functools.wraps(original)
    def forward(*args: Any, packed: PackedBatch | None = None, entropy: bool = True, **kwargs: Any) -> Any:
        if packed is None:
            return original(*args, **kwargs)
        shared = packed.prefixes.shape[0] > 0
        hidden = lm.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            # A mask of four dimensions is taken as it is: no [tokens, tokens] mask is made of the positions.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device),
            use_cache=False,
            packed_segments=plan_prefixes(packed.cu_seqlens, packed.prefixes)
            if shared
            else segments(packed.cu_seqlens),
        ).last_hidden_state[0]
        head = lm.get_output_embeddings()
        weight = head.weight.full_tensor() if hasattr(head.weight, "full_tensor") else head.weight
        return packed_logprobs(
            hidden, weight, packed.targets, row_index=packed.row_index, bias=head.bias, entropy=entropy, **settings
        )

    lm.forward = forward


def _beside(original: str) -> str:
    """Register an attention that is ours where the call says how a row is packed, and `original` elsewhere."""
    name = f"{PACKED}_beside_{original}"
    usual = ALL_ATTENTION_FUNCTIONS[original if original in ALL_ATTENTION_FUNCTIONS else "sdpa"]
    ours = ALL_ATTENTION_FUNCTIONS[PACKED]

    def attention(*args: Any, packed_segments: Any = None, **kwargs: Any) -> Any:
        if packed_segments is None:
            return usual(*args, **kwargs)
        return ours(*args, packed_segments=packed_segments, **kwargs)

    AttentionInterface.register(name, attention)
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    AttentionMaskInterface.register(name, masks[original if original in masks else "sdpa"])
    return name


def can_share(lm: PreTrainedModel) -> bool:
    """Whether rollouts may read one copy of their prompt: not under a sliding window, which may end inside it."""
    return getattr(lm.config.get_text_config(), "sliding_window", None) is None


def to_sequences(input_ids: Tensor, mask: Tensor, completion_length: int, *, share: bool) -> list[Sequence]:
    """Rows of a padded batch [B, T], prompts padded on the left and completions, the last `completion_length` columns,
    on the right; neighbours with the same prompt become a group where `share` and that is worth it."""
    cut = input_ids.shape[1] - completion_length
    rows = list(zip(input_ids.tolist(), mask.bool().tolist(), strict=True))
    prompts = [[t for t, real in zip(ids[:cut], kept[:cut], strict=True) if real] for ids, kept in rows]
    completions = [[t for t, real in zip(ids[cut:], kept[cut:], strict=True) if real] for ids, kept in rows]
    sequences = []
    for number, (prompt, run) in enumerate(groupby(zip(prompts, completions, strict=True), key=lambda pair: pair[0])):
        answers = [completion for _, completion in run]
        limit = sharing_limit(len(prompt), list(map(len, answers)), math.inf if share else 0)
        for completion in answers:
            nothing = [0.0] * len(completion)
            sequences.append(Sequence(prompt, completion, nothing, 0.0, 1.0, number if limit else None))
    return sequences


def padded_logprobs(
    model: torch.nn.Module, input_ids: Tensor, mask: Tensor, completion_length: int, *, share: bool, entropy: bool
) -> list[Tensor]:
    """Logprobs and, where asked, entropies, each [B, completion_length] float32 with zeros at padding.

    `model` may be wrapped, by accelerate or peft, around one that has a packed forward.
    """
    sequences = to_sequences(input_ids, mask, completion_length, share=share)
    found = model(packed=pack(sequences).to(input_ids.device), entropy=entropy)
    real = mask[:, -completion_length:].bool()
    return [x.new_zeros(real.shape).masked_scatter(real, x) for x in (found if entropy else found[:1])]
