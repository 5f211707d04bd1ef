"""FastRL for people who stay with TRL: GRPOTrainer that prunes before any forward pass, and packs what is left."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from ..budget import Outcome
from ..budget.ceiling import ArsCeiling, Ceiling, FixedCeiling
from ..config import BudgetConfig, PruneConfig
from ..drop_reasons import UNGRADED
from ..memory import ModelSize
from ..packing import ModelShape, TrainGroup, microbatch_flops, to_train_group
from ..prune import prune
from ..rules import require
from ..savings import Passes, flop_sums
from ..types import Group, Prompt, Rollout
from .packed_forward import add_packed_forward, can_share, padded_logprobs, to_sequences

METHODS = ("none", "mdap", "mdap_seed", "random", "cppo")
"""Prune methods that need no more than TRL's advantages and the token ids."""
PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")
"""TRL's losses that are means over the rows of a micro-batch."""
WORST = 1e-3
"""Largest difference of a float32 logprob from TRL's own, at the first micro-batch: rounding is a hundredth of it."""
STATE_FILE = "fastrl_group_size.json"


class FastGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer, with its arguments and reward functions, that trains on pruned groups without padding.

    `prune`: what is dropped after grading and before any forward pass, old and reference logprobs included; with
    `weighting: multiplicity` a kept rollout's advantage is multiplied by its weight (the KL term is not). `budget`:
    `fixed` (TRL's num_generations) or `ars`, which lowers the number of completions per prompt as pruning keeps fewer.
    With `PruneConfig(method="none")` loss and gradient are TRL's, and only padding and repeated prompts are saved. The
    savings are in the logs under `fastrl/`. Language models only. Raises ValueError for settings that contradict this.
    """

    num_generations: int
    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(
        self, *args: Any, prune: PruneConfig | None = None, budget: BudgetConfig | None = None, **kwargs: Any
    ) -> None:
        self.prune_config = prune or PruneConfig()
        super().__init__(*args, **kwargs)
        rule = f"one of {', '.join(METHODS)} in TRL"
        require(self.prune_config.method in METHODS, "prune.method", rule, self.prune_config.method)
        rule = "jaccard in TRL, which hands over no logprobs of the sampler"
        require(self.prune_config.similarity == "jaccard", "prune.similarity", rule, self.prune_config.similarity)
        rule = "none or multiplicity in TRL"
        require(self.prune_config.weighting != "match", "prune.weighting", rule, self.prune_config.weighting)
        require(self.prune_config.align == 1, "prune.align", "1 in TRL", self.prune_config.align)
        require(not self._is_vlm, "model", "a language model: images are not supported", "a vision-language model")
        require(not self.aux_loss_enabled, "router_aux_loss_coef", "0", self.router_aux_loss_coef)
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        rule = f"a multiple of num_generations ({self.num_generations}), so that every process holds whole groups"
        require(rows % self.num_generations == 0, "per_device_train_batch_size x steps_per_generation", rule, rows)
        self.ceiling = _ceiling(budget, self.num_generations, self.args.max_steps)
        for model in (self.model, self.ref_model):
            if model is not None:
                lm = model.get_base_model() if hasattr(model, "get_base_model") else model
                add_packed_forward(lm, temperature=self.temperature)
        size = ModelSize.of(lm.config)
        inner = size.layers * size.layer_parameters
        self.shape = ModelShape(parameters=inner, layers=size.layers, hidden=size.queries, head=size.table)
        self.shares = can_share(lm)
        self._checked = False
        self._deferring = False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's, but with micro-batches of pruned groups."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_prune(generation_batch)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_prune(self, generation_batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        most, size = self.num_generations, self.ceiling.size
        inputs = [row for number, row in enumerate(generation_batch) if number % most < size]
        try:
            self.num_generations = size
            with self._deferred_scoring() as postponed:
                output = self._generate_and_score_completions(inputs)
        finally:
            self.num_generations = most
        groups = self._prune(output, size)
        random.Random(self._step).shuffle(groups)
        batches = self._split(output, groups, size)
        for name in postponed:
            model = self.ref_model if name == "ref_per_token_logps" else self.model
            for batch in batches:
                batch[name] = self._score(model, batch)
        self._account(groups, batches)
        return batches

    @contextmanager
    def _deferred_scoring(self) -> Iterator[list[str]]:
        """While TRL scores all completions, note which logprobs it asks for instead: dropped ones need none.

        vLLM's importance weights need the old ones at once, and a reference that is an adapter cannot be told apart
        later: then nothing is put off.
        """
        self._deferring = not self.use_vllm and (self.beta == 0.0 or self.ref_model is not None)
        self._postponed: list[str] = []
        try:
            yield self._postponed
        finally:
            self._deferring = False

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        """As TRL's: ([B, logits_to_keep] logprobs, entropies where asked, no router loss), zero at padding."""
        if self._deferring:
            reference = model is self.ref_model
            self._postponed.append("ref_per_token_logps" if reference else "old_per_token_logps")
            return input_ids.new_zeros((input_ids.shape[0], logits_to_keep), dtype=torch.float32), None, None
        parts = []
        rows = batch_size or input_ids.shape[0]
        for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows), strict=True):
            with self.accelerator.autocast():
                settings = dict(share=self.shares, entropy=compute_entropy)
                parts.append(padded_logprobs(model, ids, mask, logits_to_keep, **settings))
        logprobs, *entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        if not self._checked:
            self._check(model, input_ids, attention_mask, logits_to_keep, logprobs.detach())
        return logprobs, entropies[0] if entropies else None, None

    @torch.no_grad()
    def _check(self, model: Any, ids: Tensor, mask: Tensor, kept: int, logprobs: Tensor) -> None:
        """Compare the first rows with TRL's own way, once. Raises ValueError where they differ."""
        self._checked = True
        theirs, _, _ = super()._get_per_token_logps_and_entropies(model, ids[:2], mask[:2], kept)
        difference = float(((theirs - logprobs[:2]) * mask[:2, -kept:]).abs().max())
        low = any(p.dtype != torch.float32 for p in self.model.parameters()) or self.args.bf16 or self.args.fp16
        # Written so that NaN fails.
        if not difference <= (1.0 if low else WORST):
            raise ValueError(f"model: packed logprobs differ from TRL's by {difference:.2g}; it cannot be packed")

    def _prune(self, output: dict[str, Any], size: int) -> list[Group]:
        """The generation batch as groups of `size` rows, with drop reasons and weights set."""
        width = output["completion_ids"].shape[1]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        sequences = to_sequences(ids, mask, width, share=False)
        groups = []
        for number in range(len(sequences) // size):
            prompt = Prompt(f"{self._step}-{number}", sequences[number * size].prompt_ids, "", {})
            rows = range(number * size, (number + 1) * size)
            rollouts = [Rollout(sequences[row].completion_ids, [], "") for row in rows]
            for row, rollout in zip(rows, rollouts, strict=True):
                # Rewards are gone by now; within a group advantages tell them apart as well.
                rollout.advantage = rollout.reward = float(output["advantages"][row])
                rollout.drop_reason = "" if rollout.completion_ids else UNGRADED
            groups.append(Group(prompt, rollouts, dead=all(r.advantage == 0 for r in rollouts), number=number))
        prune(groups, self.prune_config, kl=self.beta != 0, seed=self.args.seed, step=self._step)
        return groups

    def _split(self, output: dict[str, Any], groups: list[Group], size: int) -> list[dict[str, Any]]:
        """Cut the kept rows into as many micro-batches as TRL expects, groups side by side.

        What TRL divides by is set so that their losses add up to the loss over all that count: `num_items_in_batch`
        where it divides by tokens, `scale` where it takes the mean of a micro-batch's rows.
        """
        count, device = self.args.steps_per_generation, output["advantages"].device
        places = [(group.number * size + n, r) for group in groups for n, r in enumerate(group.rollouts)]
        kept = [(row, rollout.weight) for row, rollout in places if rollout.kept]
        # A micro-batch has at least one row: dropped ones without a token fill up.
        filler = [(row, 0.0) for row, rollout in places if not rollout.kept][: max(0, count - len(kept))]
        rows = torch.tensor([row for row, _ in kept + filler], device=device)
        weights = torch.tensor([weight for _, weight in kept + filler], device=device)
        counts = [to_train_group(group, divisor=self.prune_config.divisor) for group in groups]
        tokens, sequences = self._everywhere(counts, device)
        chosen = {
            name: value[rows] if isinstance(value, Tensor) and value.ndim > 0 else value
            for name, value in output.items()
        }
        chosen["advantages"] = chosen["advantages"] * weights
        chosen["completion_mask"] = chosen["completion_mask"] * (weights > 0)[:, None]
        chosen["num_items_in_batch"] = tokens
        batches = []
        for part in torch.arange(len(rows), device=device).tensor_split(count):
            batch = {n: v[part] if isinstance(v, Tensor) and v.ndim > 0 else v for n, v in chosen.items()}
            batch["scale"] = len(part) * count * self.accelerator.num_processes / sequences
            batches.append(batch)
        return batches

    def _everywhere(self, counts: list[TrainGroup], device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and sequences that count in the loss, over all processes."""
        mine = [[sum(c.loss_tokens for c in counts), sum(c.loss_sequences for c in counts)]]
        both = self.accelerator.gather(torch.tensor(mine, device=device)).sum(0).clamp(min=1.0)
        return both[0], both[1]

    @torch.no_grad()
    def _score(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Logprobs of a micro-batch's completions by another policy."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        return loss * inputs["scale"] if "scale" in inputs and self.loss_type in PER_ROW else loss

    def _account(self, groups: list[Group], batches: list[dict[str, Any]]) -> None:
        """Tell the budget what stayed, and the logs what was spent and saved."""
        outcomes = gather_object([Outcome.of(group) for group in groups])
        step, total = self.state.global_step + 1, max(self.state.max_steps, 1)
        metrics = {"group_size": float(self.ceiling.size)}
        self.ceiling.observe(outcomes, step=step, total_steps=total)
        forward = 0.0
        for batch in batches:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            width = batch["completion_ids"].shape[1]
            forward += microbatch_flops(to_sequences(ids, mask, width, share=self.shares), self.shape)
        passes = Passes(
            old=float("old_per_token_logps" in batches[0]),
            reference=float("ref_per_token_logps" in batches[0]),
            update=3.0 * self.num_iterations,
        )
        longest = float("inf") if self.shares else 0.0
        metrics |= flop_sums(groups, self.shape, passes, forward=forward, longest_shared=longest)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        kept = float(sum(rollout.kept for rollout in rollouts))
        metrics |= {
            "kept": kept,
            "kept_fraction": kept / len(rollouts),
            "dead_groups": float(sum(g.dead for g in groups)),
        }
        for name, value in metrics.items():
            self._metrics["train"][f"fastrl/{name}"].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            (folder / STATE_FILE).write_text(json.dumps(self.ceiling.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (file := Path(checkpoint) / STATE_FILE).is_file():
            self.ceiling.load_state_dict(json.loads(file.read_text()))


def _ceiling(budget: BudgetConfig | None, num_generations: int, max_steps: int) -> Ceiling:
    """Raises ValueError for a budget that TRL's batches of equal groups cannot follow."""
    if budget is None or budget.kind == "fixed":
        return FixedCeiling(num_generations)
    require(budget.kind == "ars", "budget.kind", "fixed or ars in TRL", budget.kind)
    known = budget.epoch_steps is not None or max_steps > 0
    require(known, "budget.epoch_steps", "given where args.max_steps is not", budget.epoch_steps)
    return ArsCeiling(
        num_generations, least=budget.min_group_size, epoch_steps=budget.epoch_steps or max(1, max_steps // 10)
    )
