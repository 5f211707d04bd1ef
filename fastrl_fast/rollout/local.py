"""The embedded sampler: decodes inside the training process with a copy of the trained model."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import RolloutConfig
from ..types import Group, ImageReader, Prompt, Rollout
from .decode import DecodeBatch, Decoder
from .request import finished_rollout, prompt_keys, sampled_vocabulary, stop_ids
from .token_choice import Truncation
from .uniforms import uniforms


@dataclass(slots=True, frozen=True)
class _Row:
    """One rollout to be made: which prompt, its index in the group, its prompt's length, and its most tokens."""

    prompt: int
    index: int
    length: int
    limit: int


class LocalSampler:
    """Samples from the transformers causal LM that it is given and owns (any dtype, any one device).

    Each prompt is computed once and its cache shared out to the rows of its group; prompts of different lengths run
    together, padded on the left; rows that are done leave the batch. `images` reads the prompts' images; tokens
    `barred` are never sampled. Raises ValueError for a model whose layers are not
    plain attention over the whole past.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        images: ImageReader | None = None,
        barred: Sequence[int] = (),
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        text_config = model.config.get_text_config()
        self._context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._window = _attention_window(text_config)
        # the trainer's copy may carry its own packed attention, which knows no cache
        model.set_attn_implementation("eager" if getattr(text_config, "attn_logit_softcapping", None) else "sdpa")
        vocabulary = sampled_vocabulary(model, tokenizer)
        self.stop_ids = stop_ids(model, tokenizer, config)
        is_stop = torch.zeros(vocabulary, dtype=torch.bool)
        is_stop[sorted(self.stop_ids)] = True
        is_stop = is_stop.to(model.device)
        self._decoder = Decoder(model, vocabulary=vocabulary, is_stop=is_stop, barred=barred, images=images)

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copies full tensors into the model by name, casting to its dtype; tied weights may come under any one name.
        What is the model's own memory stays as it is.

        Raises ValueError for an unknown name, another shape, or a weight that did not come.
        """
        own = self.model.state_dict()
        written = set()
        with torch.no_grad():
            for name, tensor in named:
                if name not in own:
                    raise ValueError(f"load_weights: the sampler's model has no weight named {name!r}")
                if own[name].shape != tensor.shape:
                    want, got = tuple(own[name].shape), tuple(tensor.shape)
                    raise ValueError(f"load_weights: {name} must have shape {want}, got {got}")
                if tensor.data_ptr() != own[name].data_ptr():
                    own[name].copy_(tensor)
                written.add(own[name].data_ptr())
        # buffers may stay away: they are no weights and do not change in training
        missing = [name for name, weight in self.model.named_parameters() if weight.data_ptr() not in written]
        if missing:
            raise ValueError(f"load_weights: {len(missing)} weights did not come, first {missing[0]!r}")

    def sample(
        self,
        prompts: list[Prompt],
        group_sizes: list[int],
        *,
        seed: int,
        step: int,
        first_index: int = 0,
        temperature: float | None = None,
        finished: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """One group per prompt, of the size asked for; see `Sampler.sample`.

        A completion ends with a stop token ("stop") or at max_completion_tokens or the model's context ("length"). A
        prompt that fills the context gets empty completions. Logprobs are float32, of the distribution sampled from.
        Raises ValueError for an empty prompt or, with sliding-window attention, one that outgrows the window.
        """
        rows = self._rows(prompts, group_sizes, first_index)
        keys = prompt_keys(prompts)
        truncation = self._truncation(self.config.temperature if temperature is None else temperature)
        groups = [
            Group(prompt, [Rollout([], [], finish_reason="length") for _ in range(size)])
            for prompt, size in zip(prompts, group_sizes, strict=True)
        ]
        missing = Counter(row.prompt for row in rows if row.limit > 0)
        finished = finished or (lambda group: None)
        for number, group in enumerate(groups):
            if not missing[number]:
                finished(group)
        for batch in _batches([row for row in rows if row.limit > 0], self.config.tokens_per_batch):
            for row, rollout in self._decode(batch, prompts, keys, truncation, seed=seed, step=step):
                group = groups[row.prompt]
                group.rollouts[row.index - first_index] = rollout
                missing[row.prompt] -= 1
                if not missing[row.prompt]:
                    finished(group)
        return groups

    def _truncation(self, temperature: float) -> Truncation:
        if temperature == 0:
            return Truncation(top_k=1)
        config = self.config
        return Truncation(temperature=temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)

    def _rows(self, prompts: list[Prompt], group_sizes: list[int], first_index: int) -> list[_Row]:
        rows = []
        for number, (prompt, size) in enumerate(zip(prompts, group_sizes, strict=True)):
            length, limit = len(prompt.token_ids), self.config.max_completion_tokens
            if length == 0:
                raise ValueError(f"prompt {prompt.id} has no tokens; use a tokenizer with a BOS token or a template")
            if self._window is not None and length + limit > self._window:
                raise ValueError(
                    f"rollout.max_completion_tokens must be at most {self._window - length} for prompt {prompt.id}: "
                    f"the local engine stays within the attention window of {self._window} tokens, got {limit}"
                )
            if self._context is not None and length + limit > self._context:
                warnings.warn(
                    f"completions are cut below rollout.max_completion_tokens = {limit} where prompt and completion "
                    f"reach the model's context of {self._context} tokens",
                    stacklevel=3,
                )
                limit = max(0, self._context - length)
            rows += [_Row(number, first_index + k, length, limit) for k in range(size)]
        return rows

    def _decode(
        self,
        rows: list[_Row],
        prompts: list[Prompt],
        keys: list[int],
        truncation: Truncation,
        *,
        seed: int,
        step: int,
    ) -> Iterator[tuple[_Row, Rollout]]:
        """Each row's rollout once its last token is there."""
        numbers = list(dict.fromkeys(row.prompt for row in rows))
        place = {number: i for i, number in enumerate(numbers)}
        columns = [(place[row.prompt], keys[row.prompt], row.index, row.limit) for row in rows]
        source, row_keys, indices, limits = torch.tensor(columns, device=self.model.device).t().contiguous()
        count = max(row.limit for row in rows)
        batch = DecodeBatch(
            prompts=[prompts[number].token_ids for number in numbers],
            pictures=[prompts[number].pictures for number in numbers],
            source=source,
            draws=uniforms(row_keys, indices, seed=seed, step=step, count=count),
            limits=limits,
        )
        for done in self._decoder.run(batch, truncation):
            for place, ids, logprobs, n in zip(*(x.tolist() for x in done), strict=True):
                yield rows[place], self._rollout(ids[:n], logprobs[:n])

    def _rollout(self, ids: list[int], logprobs: list[float]) -> Rollout:
        return finished_rollout(ids, logprobs, stop_ids=self.stop_ids, tokenizer=self.tokenizer)


def _batches(rows: list[_Row], tokens: int) -> Iterable[list[_Row]]:
    """Rows that decode together, longest prompts first: at most `tokens` with padding and limits, or a single row."""
    rows = sorted(rows, key=lambda row: (-row.length, row.prompt, row.index))
    while rows:
        size = max(1, tokens // (rows[0].length + max(row.limit for row in rows)))
        yield rows[:size]
        rows = rows[size:]


def _attention_window(text_config: object) -> int | None:
    """The window of sliding-window layers, None without any."""
    kinds = set(getattr(text_config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"rollout.engine local can't sample from layers of the kinds {sorted(unknown)}")
    window = getattr(text_config, "sliding_window", None)
    if kinds:
        return window if "sliding_attention" in kinds else None
    return window if getattr(text_config, "use_sliding_window", True) else None
