"""The key-value cache of one decode batch: preallocated, filled once per prompt, shared out to the prompt's rows."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class RowCache(DynamicCache):
    """Keys and values [rows, heads, capacity, head size] per layer, written in place: no concatenation per token.

    While prompts are fed, `begin_prompts` says which rows hold each; then every decode step appends one column to all
    rows. `select` keeps some rows, in place.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.length = 0
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._source: Tensor | None = None
        self._first_row = 0

    def begin_prompts(self, source: Tensor, *, first_row: int) -> None:
        """The next forward pass feeds prompts; its batch entry source[i] fills row first_row + i, int64."""
        self._source, self._first_row = source, first_row

    def begin_decode(self, length: int) -> None:
        """All prompts are in; they end at column `length`."""
        self._source, self.length = None, length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer with its new keys and values; returns all that the new queries may look at."""
        fresh = (key_states, value_states)
        if layer_idx not in self._buffers:
            keys, values = (x.new_empty(self.rows, x.shape[1], self.capacity, x.shape[3]) for x in fresh)
            self._buffers[layer_idx] = (keys, values)
        keys, values = self._buffers[layer_idx]
        if self._source is not None:
            rows = slice(self._first_row, self._first_row + len(self._source))
            for buffer, new in zip((keys, values), fresh, strict=True):
                buffer[rows, :, : new.shape[2]] = new.index_select(0, self._source)
            return fresh
        for buffer, new in zip((keys, values), fresh, strict=True):
            buffer[:, :, self.length] = new[:, :, 0]
        return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

    def advance(self) -> None:
        """After a decode step: the next one writes the column after."""
        self.length += 1

    def select(self, keep: Tensor) -> None:
        """Keeps the rows `keep`, int64, ascending."""
        for layer_idx, pair in self._buffers.items():
            for buffer in pair:
                buffer[: len(keep), :, : self.length] = buffer[:, :, : self.length].index_select(0, keep)
            keys, values = (buffer[: len(keep)] for buffer in pair)
            self._buffers[layer_idx] = (keys, values)

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Columns already filled."""
        return self.length


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, the most negative number elsewhere: the form that no attention kernel has to convert."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
