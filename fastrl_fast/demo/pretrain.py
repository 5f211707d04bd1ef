"""Makes the demo's base model: text, tokenizer and a tiny Llama, trained on partly wrong demonstrations in minutes."""

import argparse
import json
import math
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fastrl_fast.builtin.words import build_tokenizer
from fastrl_fast.demo import MODEL_DIR
from fastrl_fast.demo.task import QUESTIONS, RIGHT_SHARE, demonstration, examples

ROPE_THETA = 500.0
"""Sequences have some 45 tokens: with the usual 10000 most frequencies would stand still and positions be blurred."""
NUMBER_WEIGHT = 8.0
"""Weight of a number's loss: the skill hides in two of some 25 tokens, and is learned several times faster with it."""


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A randomly initialised float32 Llama of about 0.6M parameters with tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=0.04,
    )
    return LlamaForCausalLM(config)


def encode(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]], rng: random.Random, *, right_share: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] (right-padded) and labels [B, T] (-100 outside the completion and its end) of one batch."""
    prompts = [tokenizer.encode(row["prompt"] + "\n", add_special_tokens=False) for row in rows]
    answers = [tokenizer.encode(demonstration(row, rng, right_share=right_share)) for row in rows]
    width = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        ids[index, : len(whole)] = whole
        labels[index, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    steps: int,
    batch: int,
    lr: float,
    right_share: float | None,
    seed: int,
) -> None:
    """Trains `model` in place on demonstrations (`right_share`: see `demonstration`): AdamW, warm-up, cosine decay.

    Loss: weighted mean of the next-token cross-entropy over the completions; numbers weigh NUMBER_WEIGHT.
    """
    rng = random.Random(seed)
    stream = examples("train", steps * batch, seed)
    weights = torch.ones(len(tokenizer))
    weights[[tokenizer.convert_tokens_to_ids(str(number)) for number in range(10, 100)]] = NUMBER_WEIGHT
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        ids, labels = encode(tokenizer, [next(stream) for _ in range(batch)], rng, right_share=right_share)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        wanted = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted], weight=weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> dict[str, float]:
    """Share of `rows` whose completion, sampled once at temperature 1, boxes the answer: by operation and "all"."""
    enc = tokenizer([row["prompt"] + "\n" for row in rows], return_tensors="pt", padding=True)
    out = model.generate(
        input_ids=enc["input_ids"], attention_mask=enc["attention_mask"], max_new_tokens=64, do_sample=True, top_k=0
    )
    texts = tokenizer.batch_decode(out[:, enc["input_ids"].shape[1] :], skip_special_tokens=True)
    right: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for row, text in zip(rows, texts, strict=True):
        boxed = re.findall(r"\\boxed\{(\d+)\}", text)
        for key in (row["operation"], "all"):
            seen[key] += 1
            right[key] += boxed == [row["answer"]]
    return {key: right[key] / seen[key] for key in (*QUESTIONS, "all")}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the tokenizer and a bfloat16 copy of the model to `folder`, readable by transformers 4 and 5."""
    tokenizer.save_pretrained(folder)
    model.save_pretrained(
        folder, state_dict={name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    )
    # transformers 5 writes names that 4 does not know; 4 would fall back to another rope_theta without a word.
    for name, extra in (
        ("config.json", {"rope_theta": ROPE_THETA, "dtype": "bfloat16"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | extra, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Trains, saves and prints the sampled accuracy of each operation beside the share of right demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write")
    parser.add_argument("--skill-steps", type=int, default=1000, help="steps on right demonstrations only")
    parser.add_argument("--error-steps", type=int, default=400, help="steps on partly wrong demonstrations after them")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    corpus = [f"{row['prompt']}\n{demonstration(row, rng)}" for row in examples("train", 20000, args.seed)]
    tokenizer = build_tokenizer(corpus)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    pretrain(model, tokenizer, steps=args.skill_steps, batch=args.batch, lr=3e-3, right_share=1.0, seed=args.seed)
    pretrain(model, tokenizer, steps=args.error_steps, batch=args.batch, lr=1e-3, right_share=None, seed=args.seed + 1)
    save(model, tokenizer, args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    for name, share in sampled_accuracy(model, tokenizer, list(examples("heldout", 1024, args.seed))).items():
        print(f"{name}: sampled {share:.3f}, demonstrations {RIGHT_SHARE.get(name, math.nan):.2f}")


if __name__ == "__main__":
    main()
