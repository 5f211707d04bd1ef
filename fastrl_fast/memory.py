"""Memory of one rank before anything is loaded: what a config and a model's sizes say about the peak."""

import math
from dataclasses import dataclass
from typing import Any

from .config import Config, ModelConfig
from .tower import TowerShape

BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 4
"""Parameters, gradients and both of AdamW's moments are kept in float32."""
PREFETCHED_LAYERS = 2
"""Layers that FSDP2 holds whole at once: the one that computes and the one that is fetched behind it."""
LOGIT_CHUNK = {"cpu": 60e6, "cuda": 1e9}
"""Logits that the loss keeps at a time (ops/fused_policy_loss.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Widths of a dense decoder with gated feed-forward layers, and what it reads images with; `queries` and `keys` are
    heads x head size."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    tower: TowerShape | None = None

    @classmethod
    def of(cls, config: Any, tower: TowerShape | None = None) -> "ModelSize":
        """Read a transformers configuration, of its language part where it has several."""
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            queries=head * text.num_attention_heads,
            keys=head * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
            vocabulary=text.vocab_size,
            tied=config.tie_word_embeddings,  # text parts of some do not say
            tower=tower,
        )

    @property
    def layer_parameters(self) -> int:
        """Matrices and the two norms of one layer; biases are left out."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head where it has its own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tower = self.tower.parameters if self.tower else 0
        return self.layers * self.layer_parameters + self.table * (1 if self.tied else 2) + self.hidden + tower

    def layer_activation_bytes(self, width: int) -> int:
        """Bytes per token that one layer saves for its backward pass, computed in numbers of `width` bytes.

        Each of two norms: its input in float32, the scaled input, its output. Attention: queries, keys, values, its
        output as computed and as gathered for the projection. Feed-forward: gate, its silu, the other half, their
        product. What compiled passes on a CPU spare (layers.py, ops/row_attention.py) is not taken off.
        """
        norms = 2 * self.hidden * (4 + 2 * width)
        return norms + width * (3 * self.queries + 2 * self.keys + 4 * self.intermediate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank by what holds them: throughout, in the update, while sampling."""

    parameters: float
    optimizer: float
    reference: float
    sampler: float
    gradients: float
    gathered: float
    activations: float
    images: float
    head: float
    cache: float

    @property
    def throughout(self) -> float:
        return self.parameters + self.optimizer + self.reference + self.sampler

    @property
    def update(self) -> float:
        return self.gradients + self.gathered + self.activations + self.images + self.head

    @property
    def total(self) -> float:
        """The peak: gradients and activations are gone while the cache is there."""
        return self.throughout + max(self.update, self.cache)


def estimate_memory(
    size: ModelSize,
    config: Config,
    *,
    ranks: int,
    several_microbatches: bool = True,
    device: str = "cuda",
    tokens: int | None = None,
    decoded: float = math.inf,
    patches: float = 0.0,
    step_patches: float = 0.0,
) -> Memory:
    """The peak of one of `ranks` ranks, in bytes; without the CUDA context and the allocator's slack.

    With P parameters over R ranks, compute width b: float32 states 4 P / R each for parameters and gradients, 8 P / R
    for AdamW, 4 P / R for a reference; the local sampler's whole copy b P (0 with one rank in float32: the trained
    weights) and its cache; FSDP2's whole tables (its root keeps them from forward to backward) and two layers. With
    several micro-batches in an update gradients are reduced with the last one alone, and until then every rank holds
    all of them whole: 4 P; with updates.reduce_gradients microbatch only those of what is gathered. The cache has room
    for the `decoded` tokens of a rank, and at most for rollout.tokens_per_batch. A micro-batch has `tokens`, by default
    as many as it may have, and each is a target. Of images: the float32 pixels of a rank's `step_patches`, and what the
    tower keeps of the `patches` of one micro-batch, where it is trained; a frozen one has no gradients and no moments.
    What a vLLM engine takes of the same GPU is its own setting, and not counted.
    """
    width = BYTES[config.model.dtype]
    tokens = config.updates.tokens_per_microbatch if tokens is None else tokens
    tower = size.tower
    trained = size.parameters - (tower.parameters if tower and config.model.freeze_vision else 0)
    state = STATE_BYTES / ranks
    sharded, local = ranks > 1 or width != STATE_BYTES, config.rollout.engine == "local"
    whole = size.table * (1 if size.tied else 2) + PREFETCHED_LAYERS * size.layer_parameters
    whole += tower.token_weights if tower else 0
    gradients = state * trained
    deferred = several_microbatches and config.updates.reduce_gradients == "update"
    if sharded:
        gradients += STATE_BYTES * (trained if deferred else whole)
    checkpointing = config.model.activation_checkpointing
    return Memory(
        parameters=state * size.parameters,
        optimizer=2 * state * trained,
        reference=state * size.parameters if config.loss.kl_coef > 0 else 0.0,
        sampler=width * size.parameters if local and sharded else 0.0,
        gradients=gradients,
        gathered=width * whole if sharded else 0,
        activations=tokens * _activation_bytes(size, width, checkpointing=checkpointing),
        images=_image_bytes(tower, config.model, patches, step_patches) if tower else 0.0,
        head=_head_bytes(size, width, tokens) + LOGIT_CHUNK[device],
        cache=min(decoded, config.rollout.tokens_per_batch) * size.layers * 2 * size.keys * width if local else 0.0,
    )


def _activation_bytes(size: ModelSize, width: int, *, checkpointing: bool) -> int:
    """Bytes per token from the embedding to the last norm."""
    layer = size.layer_activation_bytes(width)
    layers = size.layers * size.hidden * width + layer if checkpointing else size.layers * layer
    return layers + size.hidden * (4 + 2 * width)


def _image_bytes(tower: TowerShape, config: ModelConfig, patches: float, step_patches: float) -> float:
    """Pixels of a step, and what a tower that is trained keeps of a micro-batch."""
    pixels = STATE_BYTES * tower.patch_values * step_patches
    if config.freeze_vision:
        return pixels
    kept = tower.activation_bytes(BYTES[config.dtype], checkpointing=config.activation_checkpointing)
    return pixels + patches * kept


def _head_bytes(size: ModelSize, width: int, tokens: int) -> int:
    """Rows and their gradient in float32, the gradient of the head's weight (summed in float32), and that of the
    embedding."""
    weight = size.table * (width if width == STATE_BYTES else width + STATE_BYTES)
    return 2 * STATE_BYTES * tokens * size.hidden + weight + size.table * width
