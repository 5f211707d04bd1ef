"""Memory of one rank before anything is loaded: what a config and a model's sizes say about the peak."""

from dataclasses import dataclass
from typing import Any

from .config import Config

BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 4
"""Parameters, gradients and both of AdamW's moments are kept in float32."""
PREFETCHED_LAYERS = 2
"""Layers that FSDP2 holds whole at once: the one that computes and the one that is fetched behind it."""
LOGIT_CHUNK = {"cpu": 60e6, "cuda": 1e9}
"""Logits that the loss keeps at a time (ops/fused_policy_loss.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Widths of a dense decoder with gated feed-forward layers; `queries` and `keys` are heads x head size."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "ModelSize":
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
            tied=text.tie_word_embeddings,
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
        return self.layers * self.layer_parameters + self.table * (1 if self.tied else 2) + self.hidden

    def layer_activation_bytes(self, width: int) -> int:
        """Bytes per token that one layer saves for its backward pass, computed in numbers of `width` bytes.

        Each of two norms: its input in float32, the scaled input, its output. Attention: queries, keys, values, its
        output as computed and as gathered for the projection. Feed-forward: gate, its silu, the other half, their
        product.
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
    head: float
    cache: float

    @property
    def throughout(self) -> float:
        return self.parameters + self.optimizer + self.reference + self.sampler

    @property
    def update(self) -> float:
        return self.gradients + self.gathered + self.activations + self.head

    @property
    def total(self) -> float:
        """The peak: gradients and activations are gone while the cache is there."""
        return self.throughout + max(self.update, self.cache)


def estimate_memory(
    size: ModelSize, config: Config, *, ranks: int, several_microbatches: bool = True, device: str = "cuda"
) -> Memory:
    """The peak of one of `ranks` ranks, in bytes; without the CUDA context, the allocator's slack and images.

    With P parameters over R ranks, compute width b: float32 states 4 P / R each for parameters and gradients, 8 P / R
    for AdamW, 4 P / R for a reference; the local sampler's whole copy b P and its cache; FSDP2's whole tables (its root
    keeps them from forward to backward) and two layers. With several micro-batches in an update gradients are reduced
    with the last one alone, and until then every rank holds all of them whole: 4 P. Micro-batches are taken as full;
    each of their tokens as a target. What a vLLM engine takes of the same GPU is its own setting, and not counted.
    """
    width, tokens = BYTES[config.model.dtype], config.updates.tokens_per_microbatch
    state = STATE_BYTES * size.parameters / ranks
    tables = size.table * (1 if size.tied else 2)
    sharded, local = ranks > 1 or width != STATE_BYTES, config.rollout.engine == "local"
    whole = tables + PREFETCHED_LAYERS * size.layer_parameters
    gradients = state
    if sharded:
        gradients += STATE_BYTES * (size.parameters if several_microbatches else whole)
    return Memory(
        parameters=state,
        optimizer=2 * state,
        reference=state if config.loss.kl_coef > 0 else 0.0,
        sampler=width * size.parameters if local else 0.0,
        gradients=gradients,
        gathered=width * whole if sharded else 0,
        activations=tokens * _activation_bytes(size, width, checkpointing=config.model.activation_checkpointing),
        head=_head_bytes(size, width, tokens) + LOGIT_CHUNK[device],
        cache=config.rollout.tokens_per_batch * size.layers * 2 * size.keys * width if local else 0.0,
    )


def _activation_bytes(size: ModelSize, width: int, *, checkpointing: bool) -> int:
    """Bytes per token from the embedding to the last norm."""
    layer = size.layer_activation_bytes(width)
    layers = size.layers * size.hidden * width + layer if checkpointing else size.layers * layer
    return layers + size.hidden * (4 + 2 * width)


def _head_bytes(size: ModelSize, width: int, tokens: int) -> int:
    """Rows and their gradient in float32, the gradient of the head's weight (summed in float32), and that of the
    embedding."""
    weight = size.table * (width if width == STATE_BYTES else width + STATE_BYTES)
    return 2 * STATE_BYTES * tokens * size.hidden + weight + size.table * width
