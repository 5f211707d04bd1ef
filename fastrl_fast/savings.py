"""What a step cost and what it would have cost had every rollout been trained on, in FLOPs by phase."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from .config import BudgetConfig, Config
from .method_config import STAGED
from .packing import ModelShape, sharing_limit
from .types import Group


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward-pass equivalents that a trained sequence costs in each phase after sampling, and its images in the
    update; a backward pass counts two."""

    old: float
    reference: float
    update: float
    tower: float = 0.0

    @classmethod
    def of(cls, config: Config, *, updates: int) -> "Passes":
        several = updates * config.updates.epochs > 1
        recompute = several and config.updates.old_logprobs == "recompute"
        reference = config.loss.kl_coef > 0
        update = 3.0 * config.updates.epochs
        tower = update / 3.0 if config.model.freeze_vision else update
        return cls(old=float(recompute), reference=float(reference), update=update, tower=tower)

    def cost(self, phase: str, language: float, tower: float) -> float:
        """FLOPs of a phase, from those of one forward pass."""
        passes = getattr(self, phase)
        return language * passes + tower * (self.tower if phase == "update" else passes)


def flop_sums(
    groups: list[Group],
    shape: ModelShape,
    passes: Passes,
    *,
    forward: float,
    longest_shared: float,
    tower: float = 0.0,
) -> dict[str, float]:
    """FLOPs spent by phase, those that dropped rollouts did not cost, and those that shared prompts did not cost.

    `forward`: one forward pass over this rank's micro-batches as they were packed, where a shared prompt is computed
    once in each, `tower` the vision tower's part of it; every phase after sampling is `passes` of it. Sampling a group
    is one forward pass over its prompt and one over each completion behind it (algorithms.md 2.4: 2 P T, 2 P T and
    6 P T, with the attention's part by the model's shape). Dropped rollouts save what packing all rollouts would have
    cost more, whether or not those would have shared their prompt; a group dropped whole saves its prompt too, and a
    filtered one all but its sampling. `flops_shared`, over all ranks: a prompt for every kept rollout, less what was
    spent.
    """
    generation = apart = dropped = tower_apart = tower_dropped = 0.0
    for group in groups:
        prompt, images = len(group.prompt.token_ids), shape.tower_flops(group.prompt.pictures)
        lengths = [len(rollout.completion_ids) for rollout in group.rollouts]
        kept = [len(rollout.completion_ids) for rollout in group.rollouts if rollout.kept]
        generation += _together(shape, prompt, lengths, math.inf) + images * _prompts(prompt, lengths, math.inf)
        of_all, of_kept = (sharing_limit(prompt, some, longest_shared) for some in (lengths, kept))
        dropped += _together(shape, prompt, lengths, of_all) - _together(shape, prompt, kept, of_kept)
        apart += _together(shape, prompt, kept, 0)
        tower_dropped += images * (_prompts(prompt, lengths, of_all) - _prompts(prompt, kept, of_kept))
        tower_apart += images * len(kept)
    language = forward - tower
    sums = {"flops/generation": generation}
    for name in ("old", "reference", "update"):
        sums[f"flops/{name}"] = passes.cost(name, language, tower)
        sums[f"flops_saved/{name}"] = passes.cost(name, dropped, tower_dropped)
        sums[f"flops_shared/{name}"] = passes.cost(name, apart - language, tower_apart - tower)
    return sums


def generation_saved(metrics: dict[str, float], drawn: float, budget: BudgetConfig) -> dict[str, float]:
    """FLOPs that a group of full size for each of the step's `drawn` prompts would have cost more to sample, at this
    step's mean cost of a rollout: {"flops_saved/generation": ...}; below 0 where a budget sampled more.

    Full size is `group_size`, and `max_group_size` where a budget adds rollouts up to it: what a prompt would get if
    all got as much as the hardest. None (0) where nothing was sampled.
    """
    size = budget.max_group_size if budget.kind in STAGED else budget.group_size
    generated = metrics["rollouts/generated"]
    more = drawn * size / generated - 1 if generated else 0.0
    return {"flops_saved/generation": metrics["flops/generation"] * more}


def _together(shape: ModelShape, prompt: int, lengths: list[int], longest_shared: float) -> float:
    """One forward pass over rollouts of one prompt, which those of at most `longest_shared` tokens share."""
    sharing = [length for length in lengths if prompt + length <= longest_shared]
    alone = [length for length in lengths if prompt + length > longest_shared]
    together = shape.group_flops(prompt, sharing) if sharing else 0.0
    return together + sum(shape.group_flops(prompt, [length]) for length in alone)


def _prompts(prompt: int, lengths: list[int], longest_shared: float) -> int:
    """How often their prompt is computed there."""
    alone = sum(prompt + length > longest_shared for length in lengths)
    return alone + (alone < len(lengths))


def seconds_saved(metrics: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """Seconds that rollouts not sampled, and dropped ones, would have taken at the pace of the others:
    {"seconds_saved/sample", "seconds_saved/score", "seconds_saved/update"}.

    An estimate, and none (0) where nothing was kept.
    """
    phases = {"sample": ("generation",), "score": ("old", "reference"), "update": ("update",)}
    saved = {}
    for phase, parts in phases.items():
        spent = sum(metrics[f"flops/{part}"] for part in parts)
        less = sum(metrics[f"flops_saved/{part}"] for part in parts)
        saved[f"seconds_saved/{phase}"] = seconds.get(f"seconds/{phase}", 0.0) * less / spent if spent else 0.0
    return saved


SUMMED = (
    "rollouts/generated",
    "rollouts/graded",
    "rollouts/kept",
    "groups/count",
    "groups/dead",
    "tokens/",
    "dropped/",
    "dropped_tokens/",
    "flops/",
    "flops_saved/",
    "flops_shared/",
    "prompts/",
    "collect/",
    "optimizer/updates",
    "optimizer/skipped",
    "seconds/",
    "seconds_saved/",
)
"""Metrics whose sum over a run means something: by name, or by section."""


MEANS = ("prune/fidelity", "groups/effective_size", "rollouts/kept_fraction")
"""Metrics whose mean over the steps of a run is told at its end."""


def means(metrics_file: Path) -> dict[str, float]:
    """The run's means of `MEANS` over the steps that have them, read from its metrics.jsonl."""
    steps = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    values = {name: [step[name] for step in steps if step.get(name) is not None] for name in MEANS}
    return {name: math.fsum(found) / len(found) for name, found in values.items() if found}


def totals(metrics_file: Path) -> dict[str, float]:
    """The run's sums of what each step counted, read from its metrics.jsonl, so that a resumed run counts whole."""
    sums: dict[str, list[float]] = {}
    with metrics_file.open(encoding="utf-8") as file:
        for line in file:
            for name, value in json.loads(line).items():
                if value is not None and (name in SUMMED or f"{name.split('/')[0]}/" in SUMMED):
                    sums.setdefault(name, []).append(value)
    return {name: math.fsum(values) for name, values in sums.items()}
