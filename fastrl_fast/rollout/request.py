"""What an engine is asked for one prompt, and rollouts made of what it answers."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import RolloutConfig
from ..types import Group, Prompt, Rollout
from .uniforms import text_key

_SEEDS = 1 << 62
"""Seeds of prompts lie below it; those of its completions follow, and still fit in an int64."""


PROBE_TOKENS = 16
"""Length of a completion that is sampled only to be compared with the policy."""


class EngineLost(RuntimeError):
    """There is nothing left that samples; the run can only be saved and left."""


class Completion(NamedTuple):
    """Token ids with the stop token, where there is one, and their logprobs in the distribution sampled from."""

    ids: list[int]
    logprobs: list[float]


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """`count` completions, of at most `limit` tokens each, of a call's `number`th prompt; the i-th is drawn with
    `seed` + i."""

    number: int
    prompt: Prompt
    count: int
    seed: int
    limit: int

    @property
    def tokens(self) -> int:
        """The most that it can cost."""
        return len(self.prompt.token_ids) + self.count * self.limit


class RequestMaker:
    """Makes the requests of a vLLM engine whose model takes `context` tokens, and rollouts of its answers.

    `stop_ids` end a completion; tokens `barred` are never sampled.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        stop_ids: set[int],
        context: int,
        barred: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.stop_ids = stop_ids
        self.context = context
        self.barred = barred

    def requests(
        self, prompts: list[Prompt], group_sizes: list[int], *, seed: int, step: int, first_index: int = 0
    ) -> list[Request]:
        """One for each prompt, some of no completion; vLLM draws the i-th completion of a request with its seed + i.

        Raises ValueError for an empty prompt.
        """
        made = []
        for number, (prompt, key, size) in enumerate(zip(prompts, prompt_keys(prompts), group_sizes, strict=True)):
            if not prompt.token_ids:
                raise ValueError(f"prompt {prompt.id} has no tokens; use a tokenizer with a BOS token or a template")
            own = text_key(f"{seed} {step} {key}") % _SEEDS + first_index
            made.append(Request(number=number, prompt=prompt, count=size, seed=own, limit=self._limit(prompt)))
        return made

    def _limit(self, prompt: Prompt) -> int:
        limit, left = self.config.max_completion_tokens, self.context - len(prompt.token_ids)
        if left < limit:
            warnings.warn(
                f"completions are cut below rollout.max_completion_tokens = {limit} where prompt and completion reach "
                f"the engine's context of {self.context} tokens",
                stacklevel=4,
            )
        return max(0, min(limit, left))

    def parameters(self, request: Request, *, temperature: float | None = None, whole: bool = False) -> dict[str, Any]:
        """By the names that vLLM's SamplingParams and its servers share; `temperature` None means the config's, `whole`
        the distribution without truncation."""
        config = self.config
        parameters: dict[str, Any] = {
            "n": 1 if temperature == 0 else request.count,  # vLLM refuses to draw the likeliest tokens twice
            "seed": request.seed,
            "max_tokens": request.limit,
            "temperature": config.temperature if temperature is None else temperature,
            "top_p": 1.0 if whole else config.top_p,
            "top_k": 0 if whole else config.top_k,
            "min_p": 0.0 if whole else config.min_p,
            # Servers take what is not said from the model's generation_config.json.
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,
        }
        if self.barred:
            parameters["logit_bias"] = dict.fromkeys(self.barred, -100.0)
        return parameters

    def probes(self, prompts: list[Prompt]) -> list[tuple[Request, dict[str, Any]]]:
        """A short completion of each prompt, without truncation, and its parameters."""
        requests = self.requests(prompts, [1] * len(prompts), seed=0, step=0)
        return [
            (request, self.parameters(request, whole=True) | {"max_tokens": min(request.limit, PROBE_TOKENS)})
            for request in requests
            if request.limit > 0
        ]

    def rollouts(self, request: Request, completions: list[Completion]) -> list[Rollout]:
        """As many as the request counts: a single completion of the likeliest tokens is that of all."""
        if len(completions) == 1:
            completions = completions * request.count
        return [
            finished_rollout(list(ids), list(logprobs), stop_ids=self.stop_ids, tokenizer=self.tokenizer)
            for ids, logprobs in completions
        ]


class Groups:
    """The groups of a call, which fill as requests are answered; `finished` is told each one that is full."""

    def __init__(self, requests: list[Request], finished: Callable[[Group], None] | None) -> None:
        self._finished = finished or (lambda group: None)
        self.all = [Group(request.prompt, []) for request in requests]
        self.open = [request for request in requests if request.count > 0 and request.limit > 0]
        """Requests to be answered; a prompt that fills the context gets empty completions."""
        answered = {request.number for request in requests} - {request.number for request in self.open}
        for number in sorted(answered):
            self._fill(number, [Rollout([], [], finish_reason="length") for _ in range(requests[number].count)])

    def put(self, request: Request, rollouts: list[Rollout]) -> None:
        """Fill in the answer to a request."""
        assert not self.all[request.number].rollouts, "each request is answered once"
        assert len(rollouts) == request.count, "an answer has as many completions as were asked for"
        self._fill(request.number, rollouts)

    def _fill(self, number: int, rollouts: list[Rollout]) -> None:
        self.all[number].rollouts = rollouts
        self._finished(self.all[number])


def finished_rollout(
    ids: list[int], logprobs: list[float], *, stop_ids: set[int], tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    """A completion as sampled, with its text; the stop token is part of the ids, not of the text."""
    stopped = bool(ids) and ids[-1] in stop_ids
    text = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
    assert isinstance(text, str), "one sequence decodes to one string"
    return Rollout(ids, logprobs, finish_reason="stop" if stopped else "length", text=text)


def prompt_keys(prompts: list[Prompt]) -> list[int]:
    """The random key of each prompt; one that is asked twice in a call (an epoch's border) gets two keys."""
    seen: Counter[str] = Counter()
    keys = []
    for prompt in prompts:
        keys.append(text_key(f"{prompt.id}\0{seen[prompt.id]}"))
        seen[prompt.id] += 1
    return keys


def sampled_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that mean something: rows of the embedding beyond the tokenizer's ids do not."""
    size: int = model.config.get_text_config().vocab_size
    return min(size, 1 + max(tokenizer.get_vocab().values()))


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> set[int]:
    """The model's and the tokenizer's end-of-sequence ids and the config's; those never sampled are left out.

    Raises ValueError for one of the config's that is no token id.
    """
    vocabulary = sampled_vocabulary(model, tokenizer)
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = {own} if isinstance(own, int) else set(own or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    for token in config.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise ValueError(f"rollout.stop_token_ids must be token ids in [0, {vocabulary}), got {token}")
    return {token for token in ids | set(config.stop_token_ids) if 0 <= token < vocabulary}
