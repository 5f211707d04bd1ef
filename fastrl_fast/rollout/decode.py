"""One decode batch: prompts of any lengths, rows that share a prompt's cache, rows that leave when done."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..positions import prompt_positions
from ..types import ImageReader, Picture
from .kv_cache import RowCache, additive_mask
from .token_choice import Truncation, choose

_MASK_ELEMENTS = 1 << 25
"""Largest attention mask of one prefill pass; more prompts take several passes."""
_DONE_SHARE = 8
"""Rows are taken out once one of this many is done: fewer would spend more on copying the cache than it saves."""
_CUDA_CHECK_PERIOD = 8
"""Steps between looks at which rows are done, where a look waits for the device."""


@dataclass(slots=True, kw_only=True)
class DecodeBatch:
    """What to decode together: P prompts, R rows.

    pictures: the images of each prompt; source [R] int64 ascending: the prompt of each row; draws [R, steps] float64;
    limits [R] int64 >= 1: most tokens of each row, at most `steps`.
    """

    prompts: list[list[int]]
    pictures: list[tuple[Picture, ...]]
    source: Tensor
    draws: Tensor
    limits: Tensor


class Decoded(NamedTuple):
    """Rows that are done: places in the batch [k], ids [k, steps] int64, logprobs [k, steps] float32 and lengths [k];
    beyond its length a row is junk."""

    places: Tensor
    ids: Tensor
    logprobs: Tensor
    lengths: Tensor


@dataclass(slots=True)
class _Rows:
    """The rows being decoded: place in the batch, newest token, its position, limit, mask, and whether done."""

    index: Tensor
    tokens: Tensor
    positions: Tensor
    limits: Tensor
    mask: Tensor
    done: Tensor

    def select(self, keep: Tensor) -> "_Rows":
        return _Rows(*(getattr(self, name).index_select(0, keep) for name in self.__slots__))


class Decoder:
    """Decodes batches with a causal LM, sampling from the first `vocabulary` ids but `barred`; `is_stop` [vocabulary]
    bool."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary: int,
        is_stop: Tensor,
        barred: Sequence[int] = (),
        images: ImageReader | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.is_stop = is_stop
        self._barred = [token for token in barred if token < vocabulary]
        self._images = images
        # transformers 5 renames the argument
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, batch: DecodeBatch, truncation: Truncation) -> Iterator[Decoded]:
        """Rows as they leave the batch, each once."""
        count, steps = batch.draws.shape
        width = max(map(len, batch.prompts))
        cache = RowCache(count, width + steps)
        logits, rows = self._feed_prompts(batch, cache, width)
        ids = torch.zeros_like(batch.draws, dtype=torch.int64)
        logprobs = torch.zeros_like(batch.draws, dtype=torch.float32)
        period = 1 if ids.device.type == "cpu" else _CUDA_CHECK_PERIOD
        for step in range(steps):
            rows.tokens, logprob = choose(logits, batch.draws[rows.index, step], truncation)
            ids[rows.index, step] = rows.tokens
            logprobs[rows.index, step] = logprob
            rows.done |= self.is_stop[rows.tokens] | (rows.limits <= step + 1)
            if step + 1 == steps:
                break
            if (step + 1) % period == 0:
                rows, left = self._drop_done(rows, cache)
                if len(left):
                    yield Decoded(left, ids[left], logprobs[left], self._lengths(ids[left], batch.limits[left]))
                if not len(rows.index):
                    return
            logits = self._step(rows, cache)
        left = rows.index
        yield Decoded(left, ids[left], logprobs[left], self._lengths(ids[left], batch.limits[left]))

    def _feed_prompts(self, batch: DecodeBatch, cache: RowCache, width: int) -> tuple[Tensor, _Rows]:
        """The logits of each row's first token, and the rows; prompts are padded on the left to `width`."""
        device = batch.source.device
        padding = torch.tensor([width - len(prompt) for prompt in batch.prompts], device=device)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch.prompts], device=device)
        columns = torch.arange(width, device=device)
        causal = columns.unsqueeze(1) >= columns
        # a padding column looks at itself: a softmax over nothing would be NaN
        itself = torch.eye(width, dtype=torch.bool, device=device)
        positions = _padded_positions(batch, width).to(device)
        logits = []
        for chunk, rows in self._prefill_chunks(batch, width):
            real = columns >= padding[chunk].unsqueeze(1)
            cache.begin_prompts(batch.source[rows] - chunk.start, first_row=rows.start)
            mask = additive_mask((causal & real.unsqueeze(1) | itself).unsqueeze(1), self.model.dtype)
            own = positions[:, chunk].squeeze(0)
            logits.append(self._forward(padded[chunk], mask, own, cache, batch.pictures[chunk]))
        cache.begin_decode(width)
        padding = padding[batch.source]
        visible = torch.arange(cache.capacity, device=device) >= padding.unsqueeze(1)
        index = torch.arange(len(padding), device=device)
        state = _Rows(
            index=index,
            tokens=index,
            positions=(positions.amax(dim=(0, 2)) + 1)[batch.source].unsqueeze(1),
            limits=batch.limits,
            mask=additive_mask(visible[:, None, None], self.model.dtype),
            done=torch.zeros_like(index, dtype=torch.bool),
        )
        return torch.cat(logits).index_select(0, batch.source), state

    @staticmethod
    def _prefill_chunks(batch: DecodeBatch, width: int) -> Iterator[tuple[slice, slice]]:
        """Stretches of prompts that go through the model in one pass, and the rows that they fill."""
        size = max(1, _MASK_ELEMENTS // width**2)
        for start in range(0, len(batch.prompts), size):
            stop = min(start + size, len(batch.prompts))
            first, last = torch.searchsorted(batch.source, batch.source.new_tensor([start, stop])).tolist()
            yield slice(start, stop), slice(first, last)

    def _step(self, rows: _Rows, cache: RowCache) -> Tensor:
        """Feeds each row its newest token; the logits of the next."""
        mask = rows.mask[..., : cache.length + 1]
        logits = self._forward(rows.tokens.unsqueeze(1), mask, rows.positions, cache)
        rows.positions = rows.positions + 1
        cache.advance()
        return logits

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: RowCache,
        pictures: Sequence[tuple[Picture, ...]] = (),
    ) -> Tensor:
        """Logits [rows, vocabulary] after the last column of ids [rows, columns], whose images come with them."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
            **self._seen([picture for own in pictures for picture in own]),
        )
        logits = output.logits[:, -1, : self.vocabulary]
        if self._barred:
            logits[:, self._barred] = -torch.inf
        return logits

    def _seen(self, pictures: list[Picture]) -> dict[str, Tensor]:
        if not pictures:
            return {}
        assert self._images is not None, "images are read by the model's own reader"
        device = self.model.device
        grids = torch.tensor([picture.grid for picture in pictures], device=device)
        return dict(pixel_values=self._images.pixel_values(pictures).to(device), image_grid_thw=grids)

    @staticmethod
    def _drop_done(rows: _Rows, cache: RowCache) -> tuple[_Rows, Tensor]:
        """The rows that go on, and the places of those that leave."""
        done = int(rows.done.sum())
        if done < len(rows.done) and done * _DONE_SHARE < len(rows.done):
            return rows, rows.index[:0]
        left = rows.index[rows.done]
        keep = rows.done.logical_not().nonzero().squeeze(1)
        cache.select(keep)
        return rows.select(keep), left

    def _lengths(self, ids: Tensor, limits: Tensor) -> Tensor:
        """Tokens of each row up to and with its first stop token, at most its limit."""
        stops = self.is_stop[ids]
        first_stop = stops.to(torch.int8).argmax(dim=1) + 1
        return torch.where(stops.any(dim=1), torch.minimum(first_stop, limits), limits)


def _padded_positions(batch: DecodeBatch, width: int) -> Tensor:
    """int64 [3, P, width], or [1, P, width] without images; 0 in the padding on the left."""
    axes = 3 if any(batch.pictures) else 1
    padded = torch.zeros(axes, len(batch.prompts), width, dtype=torch.int64)
    for number, (prompt, pictures) in enumerate(zip(batch.prompts, batch.pictures, strict=True)):
        padded[:, number, width - len(prompt) :] = prompt_positions(len(prompt), pictures)[:axes]
    return padded
