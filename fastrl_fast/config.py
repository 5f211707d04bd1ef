"""Every setting of a run: frozen dataclasses whose field docstrings are the help texts of the command line."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from .data_config import DataConfig
from .loss_config import LossConfig
from .method_config import AdvantageConfig, BudgetConfig, PruneConfig, check_method
from .rollout_config import RolloutConfig
from .rules import not_negative, positive, require

Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str
    """A Hugging Face folder or hub id, `builtin:demo` (the shipped tiny model), `builtin:shapes` (the one that reads
    images), `builtin:smollm2` (needs the extra `demo`) or `builtin:tiny_vlm` (reads images, and has learnt nothing)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward, backward and sampling; parameters and optimizer state are always kept in float32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    freeze_vision: bool = False
    """Keep the vision tower, with what maps it to the language model, as it is; of models that read images."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", "the name of a folder, a hub id or a builtin model", self.path)


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One reward function and its weight in the sum."""

    name: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How completions are graded."""

    functions: dict[str, float] = field(default_factory=lambda: {"math": 1.0, "format": 0.5})
    """Reward functions and their weights: math, exact, number, format, reasoning_gym, FILE.py:FUNCTION (TRL's
    signature), verl:FILE.py:FUNCTION or easyr1:FILE.py:FUNCTION."""
    right: str | None = None
    """Reward function that tells right (1) from wrong for budgets, posteriors and pruning by outcome; by default the
    first."""
    overlong_buffer: int = 0
    """In tokens: completions longer than rollout.max_completion_tokens less this lose up to 1, in proportion, at its
    end (DAPO's overlong shaping); 0 = none."""
    workers: int = 2
    """Grading processes per rank."""
    timeout: float = 10.0
    """Seconds that grading one answer may take; its worker is then killed and the answer gets 0."""

    def __post_init__(self) -> None:
        named = bool(self.functions) and all(isinstance(name, str) for name in self.functions)
        require(named, "reward.functions", "a non-empty mapping of names to weights", self.functions)
        for name, weight in self.functions.items():
            require(math.isfinite(weight), f"reward.functions.{name}", "finite", weight)
        require(any(self.functions.values()), "reward.functions", "given a weight that is not 0", self.functions)
        rule = f"one of reward.functions ({', '.join(self.functions)})"
        require(self.right is None or self.right in self.functions, "reward.right", rule, self.right)
        positive("reward", workers=self.workers, timeout=self.timeout)
        not_negative("reward", overlong_buffer=self.overlong_buffer)

    @property
    def right_name(self) -> str:
        return self.right or next(iter(self.functions))

    @property
    def terms(self) -> list[RewardTerm]:
        return [RewardTerm(name=name, weight=weight) for name, weight in self.functions.items()]


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig:
    """How the rollouts of a step become optimizer steps."""

    minibatches: int = 1
    """Optimizer steps in one pass over the rollouts of a step."""
    rollouts_per_update: int | None = None
    """Take as many optimizer steps per epoch as it needs for about this many kept rollouts each, instead of
    `minibatches`."""
    epochs: int = 1
    """Passes over the rollouts of a step."""
    tokens_per_microbatch: int = 16384
    """Tokens packed into one forward and backward pass of one rank."""
    reduce_gradients: Literal["update", "microbatch"] = "update"
    """When ranks add up their gradients: with the last micro-batch of an update, each holding all of them whole until
    then (4 bytes per parameter), or with every one, so that no rank ever does, for as many times the traffic."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """`recompute`: one forward pass before the first of several updates (free with a single one); `rollout`: the
    sampler's."""
    share_prompts: bool = True
    """Compute a prompt once for all its rollouts in a micro-batch, where that spares a tenth of their tokens; same
    gradient, checked on the first micro-batch."""

    def __post_init__(self) -> None:
        positive(
            "updates",
            minibatches=self.minibatches,
            epochs=self.epochs,
            tokens_per_microbatch=self.tokens_per_microbatch,
        )
        if self.rollouts_per_update is not None:
            positive("updates", rollouts_per_update=self.rollouts_per_update)
            rule = "1 where updates.rollouts_per_update is given"
            require(self.minibatches == 1, "updates.minibatches", rule, self.minibatches)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this Euclidean norm over all weights."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to reach 0 after the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""

    def __post_init__(self) -> None:
        positive("optimizer", lr=self.lr, max_grad_norm=self.max_grad_norm)
        not_negative("optimizer", weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", "two numbers in [0, 1)", self.betas)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out prompts: avg@k and pass@k."""

    path: str | None = None
    """Held-out data, in any form that data.path takes; none = no evaluation."""
    split: str = "test"
    """Split to load from a hub id or a folder with several splits."""
    every: int = 0
    """Evaluate every this many steps, besides before the first and after the last; 0 = only then."""
    prompts: int = 256
    """Use at most this many prompts, the first ones."""
    samples: int = 1
    """Completions per prompt, k."""
    temperature: float = 1.0
    """Sampling temperature; 0 = greedy."""
    reward: str | None = None
    """Reward function that decides right (1) or wrong; by default the first of reward.functions."""

    def __post_init__(self) -> None:
        positive("eval", prompts=self.prompts, samples=self.samples)
        not_negative("eval", every=self.every, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved to go on from."""

    every: int = 50
    """Save every this many steps, and after the last; 0 = only after the last."""
    keep: int = 2
    """Newest checkpoints kept; an older one is removed only after a newer one is complete."""
    keep_best: bool = True
    """Keep also the checkpoint that was best on held-out prompts, of those measured at the step they were saved at."""

    def __post_init__(self) -> None:
        not_negative("checkpoint", every=self.every)
        positive("checkpoint", keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where metrics go besides metrics.jsonl and the console."""

    trackers: list[Tracker] = field(default_factory=list)
    """Any of tensorboard, wandb, trackio; each must be installed."""
    rollouts: bool = True
    """Write every rollout with its reward, advantage and fate to rollouts.jsonl."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps, from 1, of which rank 0 writes what torch's profiler saw to profile/step-N.json.gz in the run folder; they
    take longer."""

    def __post_init__(self) -> None:
        first = min(self.profile_steps, default=1)
        require(first >= 1, "log.profile_steps", "steps counted from 1", self.profile_steps)
        for tracker in self.trackers:
            require(tracker in get_args(Tracker), "log.trackers", f"made of {', '.join(get_args(Tracker))}", tracker)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    updates: UpdatesConfig = field(default_factory=UpdatesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    max_steps: int | None = None
    """Steps to train; by default `epochs` passes over the data."""
    epochs: int = 1
    """Passes over the data where max_steps is not given."""
    seed: int = 0
    """Seed of data order and sampling: the same seed gives the same run."""
    run_dir: str | None = None
    """Folder of the run; by default runs/RECIPE-HASH. A folder with an unfinished run of the same config is resumed."""
    overwrite: bool = False
    """Delete the run in run_dir, not other files there, and start anew."""

    def __post_init__(self) -> None:
        require(self.max_steps is None or self.max_steps > 0, "max_steps", "greater than 0", self.max_steps)
        require(self.epochs > 0, "epochs", "greater than 0", self.epochs)
        require(self.seed >= 0, "seed", "0 or greater", self.seed)
        require(
            self.eval.reward is None or self.eval.reward in self.reward.functions,
            "eval.reward",
            f"one of reward.functions ({', '.join(self.reward.functions)})",
            self.eval.reward,
        )
        check_method(self.budget, self.advantage, self.prune, right=self.reward.right_name)
        rule = f"at most rollout.max_completion_tokens ({self.rollout.max_completion_tokens})"
        buffer = self.reward.overlong_buffer
        require(buffer <= self.rollout.max_completion_tokens, "reward.overlong_buffer", rule, buffer)
        if self.updates.old_logprobs == "rollout":
            rule = "none where updates.old_logprobs is rollout: the ratio itself corrects"
            require(self.loss.importance.kind == "none", "loss.importance.kind", rule, self.loss.importance.kind)
        elif self.rollout.steps_ahead:
            rule = "other than none, or updates.old_logprobs rollout, where rollout.steps_ahead is 1"
            require(self.loss.importance.kind != "none", "loss.importance.kind", rule, self.loss.importance.kind)
        updates = self.updates.minibatches * self.updates.epochs
        require(
            self.updates.minibatches <= self.data.prompts_per_step,
            "updates.minibatches",
            f"at most data.prompts_per_step ({self.data.prompts_per_step})",
            self.updates.minibatches,
        )
        require(updates < 10_000, "updates.minibatches x updates.epochs", "below 10000", updates)
