"""The policy: a Hugging Face causal model that reads packed rows and answers with logprobs, never with logits."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .attention import PACKED, check_no_leak
from .config import ModelConfig
from .head import HeadFunction, LogprobHead
from .layers import fuse_layers
from .ops import packed_logprobs
from .ops.packed_attention import Segments, segments
from .ops.prefix_attention import PrefixPlan, plan_prefixes
from .packing import ModelShape, Sequence, pack
from .tower import TowerShape
from .types import PackedBatch
from .vision import KINDS, barred_tokens, save_processor

# Its bars for loading weights would run into ours.
transformers_logging.disable_progress_bar()

PROBE = 12
"""Tokens that prove a model's packed forward pass before it is trained."""

ROUNDING = {"float64": 1e-8, "float32": 1e-3, "float16": 0.5, "bfloat16": 2.0}
"""Largest difference of a logprob between two ways to compute it, by the dtype it is computed in.

Random models of 4 and 24 layers, the latter with large weights too, came to 1e-6 to 2e-5 in float32, 0.001 to 0.04 in
float16 and 0.01 to 0.2 in bfloat16; completions cut off from their prompt were off by 2 to 5.
"""


class Policy(nn.Module):
    """A causal language model whose forward maps a packed batch to (logprobs [N], entropy [N]) of its targets, float32,
    or to what else its head is asked to evaluate."""

    def __init__(self, lm: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        config = lm.config.get_text_config()
        check_no_leak(config)
        output = lm.get_output_embeddings()
        head = LogprobHead(
            output,
            softcap=getattr(config, "final_logit_softcapping", None),
            logit_scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
            barred=barred_tokens(lm.config),
        )
        lm.set_output_embeddings(head)
        tower = {"vision_config": "sdpa"} if hasattr(lm.base_model, "visual") else {}
        lm.set_attn_implementation({"": PACKED, "text_config": PACKED} | tower if tower else PACKED)
        # transformers only logs a warning where a model has its attention built in, which would look across borders.
        if config._attn_implementation != PACKED:
            raise ValueError(f"model.path: {type(lm).__name__} has its attention built in, which is not supported")
        fuse_layers(lm)
        self.lm = lm
        self.temperature = temperature

    @property
    def decoder(self) -> nn.Module:
        return self.lm.base_model

    @property
    def tower(self) -> nn.Module | None:
        """What reads images, with what maps it to the language model."""
        return getattr(self.decoder, "visual", None)

    @property
    def head(self) -> LogprobHead:
        return self.lm.get_output_embeddings()

    @property
    def tied(self) -> bool:
        return self.head.weight is self.lm.get_input_embeddings().weight

    @property
    def shape(self) -> ModelShape:
        """What the cost of a sequence depends on; call it before sharding."""
        config = self.lm.config.get_text_config()
        embedding = sum(p.numel() for p in self.lm.get_input_embeddings().parameters())
        tower = TowerShape.of(self.tower, self.lm.config.vision_config) if self.tower is not None else None
        inner = sum(p.numel() for p in self.decoder.parameters()) - (tower.parameters if tower else 0) - embedding
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelShape(
            parameters=inner,
            layers=config.num_hidden_layers,
            hidden=config.num_attention_heads * head_size,
            head=self.head.weight.numel(),
            tower=tower,
        )

    @property
    def longest_shared(self) -> float:
        """Tokens of prompt and completion up to which a prompt can be shared: a sliding window must cover both."""
        config = self.lm.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        window = getattr(config, "sliding_window", None)
        slides = getattr(config, "use_sliding_window", True) and "sliding_attention" in kinds
        return window if window is not None and slides else math.inf

    @property
    def shard_units(self) -> list[nn.Module]:
        """Modules whose weights FSDP2 gathers one at a time: each layer, and the head where it has a weight of its
        own."""
        names: list[Any] = [self.lm._no_split_modules, getattr(self.decoder, "_no_split_modules", None)]
        kinds = {name for own in names for name in own or ()}
        layers = [module for module in self.decoder.modules() if type(module).__name__ in kinds]
        return [*layers, *([] if self.tied else [self.head])]

    def _plan(self, batch: PackedBatch) -> Segments | PrefixPlan:
        """The attention of all layers; capped scores are known to prefix_attention alone."""
        if (
            batch.prefixes.shape[0]
            or getattr(self.lm.config.get_text_config(), "attn_logit_softcapping", None) is not None
        ):
            return plan_prefixes(batch.cu_seqlens, batch.prefixes)
        return segments(batch.cu_seqlens)

    def forward(self, batch: PackedBatch, evaluate: HeadFunction = packed_logprobs) -> Any:
        hidden = self.decoder(
            **self._inputs(batch),
            position_ids=batch.position_ids[..., None, :],
            use_cache=False,
            packed_segments=self._plan(batch),
        ).last_hidden_state.squeeze(0)
        return self.head(hidden, batch.targets, batch.row_index, self.temperature, evaluate)

    def _inputs(self, batch: PackedBatch) -> dict[str, Tensor | None]:
        tokens = batch.input_ids[None]
        if batch.pixel_values is not None:
            return dict(input_ids=tokens, pixel_values=batch.pixel_values, image_grid_thw=batch.image_grid_thw)
        if self.tower is None:
            return dict(input_ids=tokens)
        # All ranks gather and reduce the tower's weights alike, also one without images, and in the same order.
        return dict(inputs_embeds=self.lm.get_input_embeddings()(tokens) + self._nothing_seen(tokens.device))

    def _nothing_seen(self, device: torch.device) -> Tensor:
        """0, as what the tower makes of a black image of one token, with a gradient of 0 for all its weights."""
        assert self.tower is not None, "asked for models that read images"
        vision = self.lm.config.vision_config
        side = vision.spatial_merge_size
        values = vision.temporal_patch_size * vision.patch_size**2 * getattr(vision, "in_channels", 3)
        seen = self.tower(torch.zeros(side**2, values, device=device), grid_thw=torch.tensor([[1, side, side]]))
        return torch.stack([0.0 * out.sum() for out in tree_leaves(dict(seen)) if isinstance(out, Tensor)]).sum()


def load_tokenizer(path: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises ValueError where transformers finds no tokenizer at `path`."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(_cannot_load(config, "tokenizer", error)) from error


def load_causal_lm(path: str, config: ModelConfig) -> PreTrainedModel:
    """Load the model in float32, dropout off.

    Raises ValueError where transformers finds no causal language model at `path`, or its file is damaged.
    """
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        parts = [settings, settings.get_text_config()]
        parts += [settings.vision_config] if settings.model_type in KINDS else []
        for part in parts:
            for name, value in part.to_dict().items():
                if isinstance(value, float) and "drop" in name:
                    setattr(part, name, 0.0)
        kind = AutoModelForImageTextToText if settings.model_type in KINDS else AutoModelForCausalLM
        return kind.from_pretrained(
            path,
            config=settings,
            dtype=torch.float32,
            attn_implementation="eager" if getattr(settings, "attn_logit_softcapping", None) else "sdpa",
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(_cannot_load(config, "model", error)) from error


def _cannot_load(config: ModelConfig, what: str, error: Exception) -> str:
    return f"model.path: cannot load the {what} of {config.path!r}: {' '.join(str(error).split())}"


def build_policy(lm: PreTrainedModel, config: ModelConfig, *, temperature: float) -> Policy:
    """Wrap a loaded model for training; the model's head and attention are replaced in place.

    Raises ValueError where they cannot be replaced: a few tokens go through the model before and after to find out.
    """
    probe = [token % lm.config.get_text_config().vocab_size for token in range(3, 3 + PROBE)]
    with torch.no_grad():
        own = lm.eval()(torch.tensor([probe], device=lm.device), use_cache=False).logits[0, :-1].double() / temperature
        policy = Policy(lm, temperature=temperature)
        ours, _ = policy(pack([Sequence(probe[:1], probe[1:], [0.0] * (PROBE - 1), 0.0, 0.0)]).to(lm.device))
    own[:, barred_tokens(lm.config)] = -torch.inf
    wanted = own.log_softmax(-1).gather(1, torch.tensor(probe[1:], device=lm.device)[:, None])[:, 0]
    worst, allowed = float((ours - wanted).abs().max()), ROUNDING[str(lm.dtype).removeprefix("torch.")]
    # Written so that NaN fails.
    if not worst <= allowed:
        raise ValueError(
            f"model.path: {type(lm).__name__} cannot be trained on packed rows: its logprobs there differ from its own "
            f"by up to {worst:.2g}, where rounding in {lm.dtype} explains {allowed:g}"
        )
    if config.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.freeze_vision and policy.tower is not None:
        policy.tower.requires_grad_(False)
    return policy.train()


def sampler_copy(
    lm: PreTrainedModel, *, dtype: torch.dtype, device: torch.device, share_weights: bool = False
) -> PreTrainedModel:
    """A frozen copy of a freshly loaded model on `device`, its parameters in the dtype it samples in.

    With `share_weights` those that have that dtype and device already are the same memory: they follow training.
    Buffers stay as they are: rotary frequencies in bfloat16 would shift every position.
    """
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in lm.parameters()} if share_weights else {}
    sampler = copy.deepcopy(lm, shared).eval().requires_grad_(False)
    for parameter in sampler.parameters():
        parameter.data = parameter.data.to(dtype)
    nn.Module.to(sampler, device)
    return sampler


def frozen_copy(policy: Policy) -> Policy:
    """The reference policy: the same weights, never trained."""
    return copy.deepcopy(policy).eval().requires_grad_(False)


def full_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its Hugging Face name as a whole tensor; under FSDP2 all ranks must iterate together."""
    for name, parameter in policy.lm.named_parameters():
        whole = parameter.detach()
        yield name, whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def save_pretrained(lm_folder: str, weights: dict[str, Tensor], out: Path, config: ModelConfig) -> None:
    """Write a Hugging Face folder: `weights` by name, configuration and tokenizer from `lm_folder`."""
    lm = load_causal_lm(lm_folder, config)
    lm.load_state_dict(weights, strict=False)
    missing = set(dict(lm.named_parameters())) - set(weights)
    assert not missing, f"weights lack {sorted(missing)}"
    lm.save_pretrained(out)
    load_tokenizer(lm_folder, config).save_pretrained(out)
    save_processor(lm_folder, out)
