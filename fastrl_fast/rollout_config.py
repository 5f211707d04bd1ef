"""The settings of sampling: how completions are drawn, and the engines that draw them."""

from dataclasses import dataclass, field
from typing import Literal

from .rules import not_negative, positive, require

Engine = Literal["local", "vllm", "vllm_server"]


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM, in the training process (rollout.engine vllm) or as servers beside it (vllm_server)."""

    servers: list[str] = field(default_factory=list)
    """Base URLs of the running servers of `vllm_server`, as http://node3:8000; docs/vllm.md has the command."""
    weights: Literal["nccl", "folder"] = "nccl"
    """How servers get the policy's weights after each step: over NCCL, or as files in weights_folder."""
    weights_folder: str | None = None
    """Folder for `weights: folder`, which rank 0 writes and every server reads under the same path."""
    completions_per_server: int = 256
    """Completions that a rank asks of one server at a time; what waits goes to whichever server has room first."""
    request_timeout: float = 600.0
    """Seconds that a server may take for the completions of one prompt; then another one is asked."""
    patience: float = 120.0
    """Seconds without any server, after which the run is saved and left with exit code 3."""
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory, on a CPU of the machine's, that the engine in the training process takes."""
    sleep: bool = True
    """Free the memory of the engine in the training process while the policy is trained; on GPUs only."""
    enforce_eager: bool = False
    """Run the engine in the training process without compilation and CUDA graphs: it starts faster, and samples
    slower."""
    parity: Literal["stop", "warn"] = "stop"
    """After every hand-over of weights a few logprobs of the engine are compared with the policy's; beyond
    parity_tolerance the run stops, or says so and goes on."""
    parity_tolerance: float | None = None
    """Largest mean difference of a logprob, in nats; by default 0.0001 in float32 and 0.03 in bfloat16."""

    def __post_init__(self) -> None:
        positive(
            "rollout.vllm",
            completions_per_server=self.completions_per_server,
            request_timeout=self.request_timeout,
            patience=self.patience,
        )
        share = self.gpu_memory_utilization
        require(0 < share < 1, "rollout.vllm.gpu_memory_utilization", "between 0 and 1", share)
        if self.parity_tolerance is not None:
            positive("rollout.vllm", parity_tolerance=self.parity_tolerance)
        for url in self.servers:
            rule = "made of URLs that begin with http:// or https://"
            require(url.startswith(("http://", "https://")), "rollout.vllm.servers", rule, url)
        require(len(set(self.servers)) == len(self.servers), "rollout.vllm.servers", "without repetition", self.servers)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    engine: Engine = "local"
    """The sampler: `local` decodes inside the training process, with a copy of the model; `vllm` is vLLM in the same
    process, one engine per rank; `vllm_server` asks the servers of rollout.vllm.servers."""
    max_completion_tokens: int = 1024
    """Completions are cut at this many tokens."""
    temperature: float = 1.0
    """Logits are divided by this before the softmax, in sampling and in training alike."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 = all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 = all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one; 0 = none."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, besides the model's own end-of-sequence ids."""
    steps_ahead: int = 0
    """1: with `vllm_server`, the next step's rollouts are sampled and graded while the policy is updated, so that they
    are of the policy one step ago; 0: each step's when it begins."""
    tokens_per_batch: int = 32768
    """Of the local engine: rows are decoded together while their prompt and completion tokens stay below this."""
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        positive(
            "rollout",
            max_completion_tokens=self.max_completion_tokens,
            temperature=self.temperature,
            tokens_per_batch=self.tokens_per_batch,
        )
        require(self.temperature >= 1e-8, "rollout.temperature", "1e-8 or greater", self.temperature)
        require(0 < self.top_p <= 1, "rollout.top_p", "in (0, 1]", self.top_p)
        require(0 <= self.min_p < 1, "rollout.min_p", "in [0, 1)", self.min_p)
        not_negative("rollout", top_k=self.top_k)
        require(self.steps_ahead in (0, 1), "rollout.steps_ahead", "0 or 1", self.steps_ahead)
        if self.steps_ahead:
            rule = "vllm_server where rollout.steps_ahead is 1, as the others share memory with the update"
            require(self.engine == "vllm_server", "rollout.engine", rule, self.engine)
        if self.engine == "vllm_server":
            require(bool(self.vllm.servers), "rollout.vllm.servers", "at least one URL", self.vllm.servers)
            folder = self.vllm.weights_folder
            rule = "a folder where rollout.vllm.weights is folder"
            require(self.vllm.weights != "folder" or folder is not None, "rollout.vllm.weights_folder", rule, folder)
