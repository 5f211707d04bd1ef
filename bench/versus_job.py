"""The one job that both sides of bench.versus_trl do: model, prompts, completions of planned lengths, reward."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastrl_fast.builtin import resolve_model

from .load import load_model, spread_lengths

WORDS = 1024
"""Words of the small model's language, one token each; the first three are padding, end, and unknown."""
OVERLAP = 40
"""Words that the planned answers to one prompt are made of, by Zipf's law: MDAP at tau 0.8 then keeps about the share
that the FastRL paper reports, 3 of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Sizes of a step, and what ends a sampled completion: `stops` spread its lengths as the planned ones are."""

    model: str
    folder: str
    prompts: int
    group_size: int
    prompt_tokens: int
    low: int
    high: int
    stops: list[int]
    trl_batch: int
    """Rows of TRL's micro-batches."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def tokens_per_microbatch(self) -> int:
        """As large a part of the planned tokens as TRL's micro-batch is of the rollouts, and a tenth more, as sequences
        do not fill it to the brim: both sides take as many micro-batches."""
        tokens = sum(self.prompt_tokens + sum(map(len, row["planned"])) for row in self.rows())
        return math.ceil(1.1 * tokens * min(1.0, self.trl_batch / self.rollouts))

    def rows(self) -> list[dict[str, Any]]:
        """The prompts, each with its planned completions."""
        return json.loads((Path(self.folder) / "rows.json").read_text())


def small_job(folder: Path, *, quick: bool, trl_batch: int) -> Job:
    """A 3.4M Qwen2 and 8 prompts x 8 completions of 8 to 256 tokens; stop words make sampled ones 64 long on average,
    as the planned ones are."""
    high = 64 if quick else 256
    stops = list(range(1, 1 + WORDS // (high // 4)))
    load_model("3.4M").save_pretrained(folder / "model")
    _word_tokenizer().save_pretrained(folder / "model")
    sizes = dict(prompts=2 if quick else 8, group_size=8, prompt_tokens=32, low=8, high=high)
    job = Job(model=str(folder / "model"), folder=str(folder), stops=stops, trl_batch=trl_batch, **sizes)
    tokens = torch.arange(3 + len(stops), WORDS)
    _write_rows(
        job, [" ".join(f"w{t}" for t in _draw(tokens, job.prompt_tokens, n)) for n in range(job.prompts)], tokens
    )
    return job


def smollm2_job(folder: Path, *, quick: bool, trl_batch: int) -> Job:
    """SmolLM2-135M, 2 prompts x 8 completions of 8 to 128 tokens; a full stop or a new line ends a sampled one."""
    path = resolve_model("builtin:smollm2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (".", "Ċ")]
    sizes = dict(prompts=1 if quick else 2, group_size=8, prompt_tokens=32, low=8, high=64 if quick else 128)
    batch = min(trl_batch, sizes["prompts"] * sizes["group_size"])
    job = Job(model=path, folder=str(folder), stops=stops, trl_batch=batch, **sizes)
    questions = [
        "Write one sentence about how the river that runs through the old town changed over the last hundred years and "
        "what the people who live there say about the new bridge",
        "Tell me what a person who has never cooked before should buy, prepare and watch out for when they want to "
        "make a soup for eight friends on a cold day",
    ][: job.prompts]
    _write_rows(job, questions, torch.arange(1000, 9000))
    return job


def _write_rows(job: Job, questions: list[str], tokens: torch.Tensor) -> None:
    lengths = spread_lengths(job.prompts, job.group_size, low=job.low, high=job.high)
    rows = []
    for number, (question, group) in enumerate(zip(questions, lengths, strict=True)):
        own = torch.tensor(_draw(tokens, OVERLAP, 1000 + number))
        law = 1.0 / torch.arange(1, OVERLAP + 1)
        generator = torch.Generator().manual_seed(number)
        planned = [own[torch.multinomial(law, n, replacement=True, generator=generator)].tolist() for n in group]
        rows.append({"prompt": question, "planned": planned})
    folder = Path(job.folder)
    folder.joinpath("rows.json").write_text(json.dumps(rows))
    with folder.joinpath("prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows)


def _draw(tokens: torch.Tensor, count: int, seed: int) -> list[int]:
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    return tokens[order[:count]].tolist()


def _word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(3, WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
