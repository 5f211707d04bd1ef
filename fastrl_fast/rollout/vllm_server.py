"""Sampling from vLLM servers beside the training processes, over HTTP."""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import distributed
from ..config import RolloutConfig
from ..types import Group, Prompt
from .request import Completion, EngineLost, Groups, Request, RequestMaker, stop_ids
from .server_pool import BadAnswer, Job, Server, ServerPool
from .weight_transfer import FolderTransfer, Meta, NcclTransfer, Transfer

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
FORGET_SECONDS = 30.0
"""A request that was called off is gone from a server after its next token."""
ONE_CHOICE = 1e-4
"""Where a token is drawn from one alone its logprob is 0, but for rounding."""


class ServerSampler:
    """Asks running vLLM servers for completions; a prompt with all its completions is one request to one server.

    Every rank asks all servers. A server that fails loses nothing: what it was asked is asked of another, with the same
    seeds.
    """

    def __init__(self, pool: ServerPool, maker: RequestMaker, transfer: Transfer, *, model: str) -> None:
        self.pool = pool
        self.maker = maker
        self.transfer = transfer
        self.model = model
        self._checked: set[str] = set()

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

        Raises EngineLost where no server is left, and ValueError for a prompt without tokens or a request that servers
        call wrong.
        """
        requests = self.maker.requests(prompts, group_sizes, seed=seed, step=step, first_index=first_index)
        groups = Groups(requests, finished)
        jobs = [self._job(request, temperature) for request in groups.open]
        for request, completions in self.pool.answers(jobs):
            groups.put(request, self.maker.rollouts(request, completions))
        return groups.all

    def probe(self, prompts: list[Prompt]) -> list[Group]:
        """A completion per prompt of each server that this rank looks after, drawn without truncation.

        Raises ValueError for a server whose logprobs are not those of the distribution sampled from.
        """
        groups = []
        serving = [server for server in self.pool.servers if server.serving]
        for server in serving[distributed.rank() :: distributed.world_size()]:
            for request, parameters in self.maker.probes(prompts):
                self._check_mode(server, request)
                answer = self.pool.post(server, COMPLETIONS, self._body(request, parameters))
                if answer is not None:
                    rollouts = self.maker.rollouts(request, read_completions(answer, 1))
                    groups.append(Group(request.prompt, rollouts))
        return groups

    def rest(self) -> None:
        """Servers have memory of their own."""

    def close(self) -> None:
        """The servers go on."""
        self.pool.close()

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Hand the policy's weights to every server that is there; rank 0 sends them, and all ranks call this together.

        Raises on all ranks EngineLost where no server takes them, and ValueError where a server calls a request of the
        hand-over wrong or the folder cannot be written.
        """
        weights, taken = iter(named), []
        problem: Exception | None = None
        if distributed.rank() == 0:
            try:
                taken = self._hand_over(weights)
            except (EngineLost, ValueError) as error:
                problem = error
            except OSError as error:
                problem = ValueError(f"rollout.vllm.weights_folder: {error}")
        for _ in weights:  # to gather one is a matter of all ranks
            pass
        taken, problem = distributed.broadcast_object((taken, problem))
        self.pool.mark_current(taken)
        if problem:
            raise problem

    def _hand_over(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return the URLs of the servers that have the weights and nothing cached of the old ones."""
        taken = self.transfer.send(weights, self.pool, self.pool.well())
        fresh = [server.url for server in taken if self._forget_prompts(server)]
        if not fresh:
            raise EngineLost("no vLLM server took the policy's weights")
        return fresh

    def _forget_prompts(self, server: Server) -> bool:
        """Empty the cache of the old weights. vLLM does not while it works on anything, if only on what was called off
        a moment ago."""
        limit = time.monotonic() + FORGET_SECONDS
        while (answer := self.pool.post(server, "/reset_prefix_cache")) is not None:
            if answer.get("success", True):
                return True
            if time.monotonic() > limit:
                log.warning("vLLM server %s: is still busy, and left out until the next hand-over", server.url)
                break
            time.sleep(0.1)
        return False

    def _check_mode(self, server: Server, request: Request) -> None:
        """Once per server: of one likeliest token alone, the logprob is 0 in the distribution sampled from."""
        if server.url in self._checked:
            return
        body = self._body(request, self.maker.parameters(request) | {"top_k": 1, "n": 1, "max_tokens": 1})
        answer = self.pool.post(server, COMPLETIONS, body)
        if answer is None:
            return
        self._checked.add(server.url)
        logprob = read_completions(answer, 1)[0].logprobs[0]
        if abs(logprob) > ONE_CHOICE:
            raise ValueError(
                f"rollout.vllm.servers: {server.url} must be started with --logprobs-mode processed_logprobs: it gives "
                f"the only token that top_k 1 leaves a logprob of {logprob:.4f}, where sampling draws it always"
            )

    def _job(self, request: Request, temperature: float | None) -> Job[Request, list[Completion]]:
        parameters = self.maker.parameters(request, temperature=temperature)
        return Job(
            item=request,
            path=COMPLETIONS,
            body=self._body(request, parameters),
            completions=request.count,
            tokens=request.tokens,
            read=lambda answer: read_completions(answer, parameters["n"]),
        )

    def _body(self, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "prompt": request.prompt.token_ids, "return_token_ids": True} | parameters


def read_completions(answer: Any, count: int) -> list[Completion]:
    """The completions in an answer of the OpenAI interface, in the order of their seeds. Raises BadAnswer unless there
    are `count` of them, each with as many logprobs as tokens."""
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        completions = [Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        whole = [len(ids) == len(logprobs) > 0 and None not in logprobs for ids, logprobs in completions]
    except (KeyError, TypeError) as error:
        raise BadAnswer(f"answered without {error}") from error
    if len(completions) != count or not all(whole):
        raise BadAnswer(f"answered with {sum(whole)} whole completions, where {count} were asked for")
    return completions


def build_servers(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    *,
    dtype: torch.dtype,
    barred: list[int],
) -> ServerSampler:
    """A sampler over the servers of `config`, of whose model `lm` is the loaded one; waits until they are there.

    Raises ValueError where none is, or they serve no model.
    """
    settings = config.vllm
    pool = ServerPool(
        settings.servers,
        room=settings.completions_per_server,
        timeout=settings.request_timeout,
        patience=settings.patience,
    )
    try:
        served = [pool.get(server, "/v1/models") for server in pool.well(wait_for_all=True)]
        model = next(answer for answer in served if answer is not None)["data"][0]
    except (EngineLost, StopIteration, LookupError) as error:
        raise ValueError(f"rollout.vllm.servers: none serves a model ({error})") from error
    maker = RequestMaker(
        tokenizer,
        config,
        stop_ids=stop_ids(lm, tokenizer, config),
        context=model.get("max_model_len") or lm.config.get_text_config().max_position_embeddings,
        barred=barred,
    )
    transfer: Transfer
    if settings.weights == "folder":
        assert settings.weights_folder is not None, "the config asks for one"
        transfer = FolderTransfer(Path(settings.weights_folder), dtype=dtype)
    else:
        shapes = [(name, tuple(parameter.shape)) for name, parameter in lm.named_parameters()]
        transfer = NcclTransfer([Meta(name, dtype, shape) for name, shape in shapes])
    return ServerSampler(pool, maker, transfer, model=model["id"])
