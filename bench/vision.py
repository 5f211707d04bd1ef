"""One update's forward and backward passes over prompts with an image, which is read once for all their completions,
against a prompt and an image for every completion.

python bench/vision.py [--json FILE] [--device cuda] [--threads N] [--only TEXT] [--repeats N]

The model is a Qwen2.5-VL of 4M parameters in its language model and 1M in its tower; rows are packed and planned by the
trainer's own functions, in micro-batches of 16384 tokens. The step that shares nothing is the trainer's with
updates.share_prompts=false.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import timing
import torch
from shared_prompt import update
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from fastrl_fast import packing
from fastrl_fast.model import Policy
from fastrl_fast.types import Picture

VOCABULARY, IMAGE = 4096, 4092
PATCH_VALUES = 3 * 2 * 14 * 14


def make_policy(device: str) -> Policy:
    torch.manual_seed(0)
    text = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)
    text |= dict(num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True)
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6]))
    tower = dict(depth=4, hidden_size=128, intermediate_size=344, num_heads=4, out_hidden_size=256)
    tower |= dict(window_size=112, fullatt_block_indexes=[3])
    special = dict(image_token_id=IMAGE, video_token_id=4093, vision_start_token_id=4094, vision_end_token_id=4095)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **special)
    return Policy(Qwen2_5_VLForConditionalGeneration(config), temperature=1.0).to(device)


def read(pictures: Sequence[Picture]) -> Tensor:
    """Random pixels, the same for the same image."""
    parts = [
        torch.randn(picture.patches, PATCH_VALUES, generator=torch.Generator().manual_seed(len(picture.data)))
        for picture in pictures
    ]
    return torch.cat(parts)


def sequences(grid: tuple[int, int], text: int, completion: int, count: int, *, share: bool) -> list[packing.Sequence]:
    """One group: an image of `grid` tokens, `text` tokens before and behind it, and its completions."""
    make = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(IMAGE, (length,), generator=make).tolist()

    picture = Picture(b"1", (1, 2 * grid[0], 2 * grid[1]), 2, text)
    prompt = [*ids(text), *[IMAGE] * picture.tokens, *ids(text)]
    answers, zeros, group = [ids(completion) for _ in range(count)], [0.0] * completion, 0 if share else None
    return [packing.Sequence(prompt, answer, zeros, 1.0, 1.0, group, (picture,)) for answer in answers]


def case(policy: Policy, grid: tuple[int, int], completion: int, *, wanted: float) -> timing.Case:
    def check(results: dict[str, Any]) -> None:
        ours, theirs = results.values()
        assert abs(ours["loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"])
        assert (ours["gradient"] - theirs["gradient"]).norm() <= 1e-4 * theirs["gradient"].norm()

    runs = {
        name: update(policy, sequences(grid, 16, completion, 8, share=share), read)
        for name, share in (("shared", True), ("a prompt each", False))
    }
    tokens = grid[0] * grid[1] + 32
    return timing.Case(
        name=f"prompt {tokens} with an image of {grid[0] * grid[1]}, 8 completions of {completion}",
        runs=runs,
        check=check,
        wanted={"a prompt each": wanted},
    )


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    policy = make_policy(setting.device)
    if setting.quick:
        yield case(policy, (4, 5), 8, wanted=1.0)
        return
    yield case(policy, (32, 31), 200, wanted=3.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
