"""Rotary positions of prompts with images, (frame, row, column) for each token, and of what follows them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import Picture


def prompt_positions(length: int, pictures: Sequence[Picture]) -> Tensor:
    """int64 [3, length] for a prompt of `length` tokens: three times 0, 1, 2 ... but for the tokens of images.

    Of an image that begins at position p the token in row i and column j has (p, p + i, p + j); what follows goes on
    from p + max(rows, columns) (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    parts: list[Tensor] = []
    position, done = 0, 0
    for picture in pictures:
        frames, rows, columns = picture.grid[0], picture.grid[1] // picture.merge, picture.grid[2] // picture.merge
        assert frames == 1, "an image is one frame"
        before = picture.start - done
        parts.append(_text(position, before))
        position += before
        own = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(columns))
        parts.append(own.T + position)
        position, done = position + max(rows, columns), picture.start + picture.tokens
    assert done <= length, "a prompt holds its images whole"
    return torch.cat([*parts, _text(position, length - done)], dim=1)


def going_on(positions: Tensor, count: int) -> Tensor:
    """int64 [3, count] for the tokens behind a prompt of these positions."""
    return _text(int(positions.max()) + 1, count)


def _text(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, -1)
