"""Makes the model of the recipe `shapes`: a tiny Qwen2.5-VL, trained on partly wrong demonstrations in minutes."""

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastrl_fast.builtin import tiny_vlm
from fastrl_fast.builtin.words import build_tokenizer
from fastrl_fast.config import DataConfig, ModelConfig, RolloutConfig
from fastrl_fast.demo import SHAPES_MODEL_DIR
from fastrl_fast.demo.shapes import QUESTIONS, RIGHT_SHARE, demonstration, examples
from fastrl_fast.model import Policy, build_policy, load_causal_lm, load_tokenizer
from fastrl_fast.packing import Sequence, pack
from fastrl_fast.rewards import exact_reward
from fastrl_fast.rollout import build_sampler
from fastrl_fast.types import ImageReader, Prompt
from fastrl_fast.vision import barred_tokens, load_images

GAIN = 4.0
"""Times transformers' initial deviation of 0.02."""
ANSWER_WEIGHT = 8.0
"""Weight of the loss of tokens that hold an answer: the skill hides in two of some 20 tokens."""


def to_prompt(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase, images: ImageReader) -> Prompt:
    """As the recipe's data gives it: the drawing, the question, and the template's line break."""
    text = example["prompt"].replace("<image>", images.placeholder)
    tokens, pictures = images.place(tokenizer.encode(f"{text}\n"), example["images"])
    return Prompt(example["prompt"], tokens, example["prompt"], example, pictures)


def build(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Qwen2.5-VL of about half a million random weights; with transformers' own width of 0.02 its narrow layers pass
    on next to nothing, and learn several times slower."""
    lm = tiny_vlm.build(tokenizer)
    with torch.no_grad():
        for module in lm.modules():
            if isinstance(module, nn.Linear) and module is not lm.get_output_embeddings():
                module.weight.mul_(GAIN)
    return lm


def pretrain(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageReader,
    *,
    steps: int,
    batch: int,
    lr: float,
    write: Callable[[dict[str, Any]], str],
    seed: int,
) -> None:
    """Trains `policy` in place on the completions that `write` gives examples: AdamW, warm-up, cosine decay.

    Loss: weighted mean of the next-token cross-entropy over the completions; answers weigh ANSWER_WEIGHT.
    """
    stream = examples("train", steps * batch, seed)
    weights = answer_weights(tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        sequences = []
        for example in (next(stream) for _ in range(batch)):
            prompt = to_prompt(example, tokenizer, images)
            completion = [*tokenizer.encode(write(example)), tokenizer.eos_token_id]
            zeros = [0.0] * len(completion)
            sequences.append(Sequence(prompt.token_ids, completion, zeros, 0.0, 1.0, pictures=prompt.pictures))
        packed = pack(sequences, images.pixel_values)
        logprobs, _ = policy(packed)
        weight = weights[packed.targets]
        loss = -(weight * logprobs).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)


def answer_weights(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The weight of each token [V] in the loss."""
    answers = [answer for _, answers in QUESTIONS.values() for answer in answers]
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return torch.tensor([ANSWER_WEIGHT if any(answer in text for answer in answers) else 1.0 for text in texts])


def sampled_accuracy(folder: Path, count: int, seed: int) -> dict[str, float]:
    """Share of held-out examples that the model in `folder` answers right, sampled once at temperature 1: by question
    and "all"."""
    config = ModelConfig(path=str(folder))
    tokenizer, lm = load_tokenizer(config.path, config), load_causal_lm(config.path, config)
    images = load_images(config.path, tokenizer, config, DataConfig(path="none"))
    assert images is not None, "the model reads images"
    rows = list(examples("heldout", count, seed))
    settings = RolloutConfig(max_completion_tokens=48)
    sampler = build_sampler(settings, lm, tokenizer, images=images, barred=barred_tokens(lm.config))
    prompts = [to_prompt(row, tokenizer, images) for row in rows]
    texts = [group.rollouts[0].text for group in sampler.sample(prompts, [1] * count, seed=seed, step=0)]
    right: Counter[str] = Counter()
    for row, value in zip(rows, exact_reward([], texts, answer=[row["answer"] for row in rows]), strict=True):
        right[row["asked"]] += int(value or 0)
        right["all"] += int(value or 0)
    seen = Counter(row["asked"] for row in rows) | Counter(all=count)
    return {key: right[key] / seen[key] for key in (*QUESTIONS, "all")}


def save(policy: Policy, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer, image processor and a bfloat16 copy of the weights as transformers reads them."""
    blank = tiny_vlm.build(tokenizer).bfloat16()
    blank.load_state_dict(policy.lm.state_dict(), strict=False)
    blank.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny_vlm.IMAGES, indent=2) + "\n")


def main() -> None:
    """Trains on bare right answers, then on right demonstrations, then on partly wrong ones; saves and prints the
    sampled accuracy of each question beside the share of right demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SHAPES_MODEL_DIR, help="folder to write")
    parser.add_argument("--steps", type=int, nargs=3, default=[700, 450, 100], help="bare, right, partly wrong")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    corpus = [f"{row['prompt'][7:]}\n{demonstration(row, rng)}" for row in examples("train", 3000, args.seed)]
    tokenizer = build_tokenizer(corpus)
    tokenizer.add_special_tokens({"additional_special_tokens": tiny_vlm.SPECIAL})
    policy = build_policy(build(tokenizer), ModelConfig(path="none"), temperature=1.0)
    args.out.mkdir(parents=True, exist_ok=True)
    save(policy, tokenizer, args.out)
    images = load_images(str(args.out), tokenizer, ModelConfig(path="none"), DataConfig(path="none"))
    assert images is not None, "the model reads images"
    print(f"{sum(p.numel() for p in policy.parameters())} parameters, {len(tokenizer)} tokens", flush=True)
    phases: list[tuple[float, Callable[[dict[str, Any]], str]]] = [
        (1.5e-3, lambda row: f" \\boxed{{{row['answer']}}}."),
        (1e-3, lambda row: demonstration(row, rng, right_share=1.0)),
        (1e-3, lambda row: demonstration(row, rng)),
    ]
    for number, (steps, (lr, write)) in enumerate(zip(args.steps, phases, strict=True)):
        seed = args.seed + number
        pretrain(policy, tokenizer, images, steps=steps, batch=args.batch, lr=lr, write=write, seed=seed)
    save(policy, tokenizer, args.out)
    for name, value in sampled_accuracy(args.out, 768, args.seed).items():
        print(f"{name}: sampled {value:.3f}, demonstrations {RIGHT_SHARE.get(name, math.nan):.2f}")


if __name__ == "__main__":
    main()
