"""A Qwen2.5-VL of half a million random weights, with a byte tokenizer and an image processor: to try and to test the
whole way from a diagram to an update, not to be right."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VERSION = 1
"""Counts changes of what is written, which lies in the user's cache."""

END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
TOWER = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, window_size=112, fullatt_block_indexes=[1])
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}
"""Of Qwen2-VL, but for at most 64 tokens an image, and an even range of colours."""


def write(folder: Path) -> None:
    """Write the model, always the same, as transformers saves it."""
    tokenizer = byte_tokenizer()
    build(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=2))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and the special tokens of Qwen-VL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=SPECIAL
    )
    fast.chat_template = CHAT
    return fast


def build(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    special: dict[str, Any] = {f"{name}_token_id": token for name, token in vision_ids(tokenizer).items()}
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 4, 4])
    text = SIZES | ends | dict(vocab_size=len(tokenizer), max_position_embeddings=4096, tie_word_embeddings=True)
    config = Qwen2_5_VLConfig(
        text_config=text | dict(rope_parameters=rope),
        vision_config=TOWER | dict(out_hidden_size=SIZES["hidden_size"]),
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = Qwen2_5_VLForConditionalGeneration(config)
    lm.generation_config.eos_token_id, lm.generation_config.pad_token_id = ends["eos_token_id"], ends["pad_token_id"]
    return lm


def vision_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The special tokens by the names that a model's config has for them."""
    tokens = {"vision_start": SPECIAL[1], "vision_end": SPECIAL[2], "image": SPECIAL[3], "video": SPECIAL[4]}
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[token] for name, token in tokens.items()}
