"""One step of group-based reinforcement learning, phase by phase."""

import time
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import distributed, packing, savings, step_report
from .accuracy import Accuracy
from .advantage import Posterior, assign_advantages
from .budget import Budget
from .checkpoint import Checkpointer
from .collect import Collected, Collector
from .config import Config
from .data import PromptData
from .interrupt import CutShort, Interrupt, InterruptibleGrader, InterruptibleSampler, Recall
from .loss import build_objective, policy_loss, sum_names
from .metrics import Clock, RunLog, phase
from .microbatches import plan_microbatches
from .model import Policy, full_weights
from .optimizer import learning_rate
from .parity import ParityCheck
from .prune import cut_step, measure_fidelity, offers, prune, put_back, sizes
from .rewards import Grader
from .rollout import EngineSampler, Sampler
from .schedule import InTurn, OneAhead, Schedule
from .sharing_check import SharingCheck
from .types import Group, ImageReader, PackedBatch

BAD_GRADIENTS_IN_A_ROW = 5
"""An update whose gradient is not finite is skipped on all ranks; after this many in a row the run stops."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything a run works with, built in train.py; `log` on rank 0 only."""

    policy: Policy
    shape: packing.ModelShape
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    sampler: Sampler
    data: PromptData
    images: ImageReader | None = None
    grader: Grader
    budget: Budget
    posterior: Posterior
    accuracy: Accuracy | None
    checkpointer: Checkpointer
    log: RunLog | None
    device: torch.device


@dataclass(slots=True)
class Update:
    """One optimizer step: this rank's micro-batches and the FLOPs of one forward pass over them, in all and in the
    vision tower, and the divisor and number of sequences over all ranks."""

    batches: list[PackedBatch]
    divisor: packing.Divisor
    sequences: int
    flops: float
    tower_flops: float


class Trainer:
    """Takes the steps of a config; `interrupt` may end one before its update."""

    def __init__(self, config: Config, parts: Parts, *, total_steps: int) -> None:
        self.config = config
        self.parts = parts
        self.total_steps = total_steps
        self.objective = build_objective(config.loss)
        self.clock = Clock(on_phase=parts.log.during if parts.log else None)
        self.interrupt = Interrupt()
        self.sampler = InterruptibleSampler(parts.sampler, self.interrupt)
        self.schedule = self._schedule()
        self.steps_done = 0
        self.sampler_steps = -1
        """Steps that the policy had done when the sampler got its weights last."""
        self.bad_gradients = 0
        self.longest_shared = parts.policy.longest_shared if config.updates.share_prompts else 0
        self.sharing_check = SharingCheck(config.model.dtype)
        self.parity = ParityCheck(config, parts.data, parts.images)
        self._warn_of_window()

    def step(self) -> dict[str, float]:
        """Sample, grade, decide what is worth training on, update; return the step's metrics over all ranks."""
        started = time.perf_counter()
        collected = self.collect()
        self.prune(collected.groups)
        self.learn(collected)
        self.schedule.before_update(self.steps_done)
        updates = self.pack(collected.groups)
        self.score(updates)
        metrics, sums = self.update(updates)
        self.steps_done += 1
        self.schedule.after_update()
        report = self._report(collected, updates, sums)
        return metrics | collected.counts | report | {"seconds/step": time.perf_counter() - started}

    def _schedule(self) -> Schedule:
        config, parts = self.config, self.parts

        def collector(cut_short: CutShort, clock: Clock, group: ProcessGroup | None = None) -> Collector:
            sampler = InterruptibleSampler(parts.sampler, self.interrupt, cut_short)
            grader = cast(Grader, InterruptibleGrader(parts.grader, cut_short))
            return Collector(config, parts.data, sampler, grader, parts.budget, clock, group=group)

        if config.rollout.steps_ahead == 0:
            own = collector(self.interrupt.cut_short, self.clock)
            return InTurn(own, parts.data, self.interrupt, refresh=self.refresh_sampler)
        recall = Recall()
        return OneAhead(
            collector(recall.cut_short, Clock(), distributed.side_group()),
            parts.data,
            self.interrupt,
            recall=recall,
            refresh=self.refresh_sampler,
            clock=self.clock,
            total_steps=self.total_steps,
        )

    def collect(self) -> Collected:
        """The step's graded groups; where a rank was asked to stop it is Interrupted, as if the step had not begun."""
        collected = self.schedule.take(self.steps_done)
        if isinstance(self.parts.sampler, EngineSampler):
            self.parts.sampler.rest()
        return collected

    @phase("prune")
    def prune(self, groups: list[Group]) -> None:
        """Advantages come from whole groups; what is dropped afterwards costs no forward pass."""
        config, kl = self.config, self.config.loss.kl_coef > 0
        assign_advantages(groups, preset=config.advantage.preset)
        self.parts.posterior.assign(groups)
        advantages = [[rollout.advantage for rollout in group.rollouts] for group in groups]
        prune(groups, config.prune, config.advantage, kl=kl, seed=config.seed, step=self.steps_done)
        if config.prune.method == "cppo_batch":
            cut_step(groups, distributed.gather_lists(sizes(groups)), keep_fraction=config.prune.keep_fraction)
        if config.prune.align > 1:
            put_back(groups, distributed.gather_lists(offers(groups, kl=kl)), multiple=config.prune.align)
        measure_fidelity(groups, advantages)

    @phase("prune")
    def learn(self, collected: Collected) -> None:
        """Every rank remembers all ranks' outcomes, so that all plan alike."""
        outcomes = distributed.gather_lists(collected.outcomes())
        self.parts.budget.observe(outcomes, step=self.steps_done + 1, total_steps=self.total_steps)
        self.parts.posterior.observe(outcomes)

    @phase("pack")
    def pack(self, groups: list[Group]) -> list[Update]:
        divisor, config = self.config.prune.divisor, self.config.updates
        mine = [
            (group.number, packing.to_train_group(group, divisor=divisor, longest_shared=self.longest_shared))
            for group in groups
        ]
        everywhere = [group for _, group in sorted(distributed.gather_lists(mine), key=lambda numbered: numbered[0])]
        if config.rollouts_per_update is None:
            parts = packing.split_minibatches(everywhere, config.minibatches)
        else:
            parts = packing.split_by_rollouts(everywhere, config.rollouts_per_update)
        return [self._pack(part) for part in parts]

    def _pack(self, groups: list[packing.TrainGroup]) -> Update:
        sequences = [sequence for group in groups for sequence in group.sequences]
        plan = plan_microbatches(
            sequences,
            ranks=distributed.world_size(),
            tokens_per_microbatch=self.config.updates.tokens_per_microbatch,
            shape=self.parts.shape,
        )
        mine = [[sequences[i] for i in members] for members in plan[distributed.rank()]]
        read = self.parts.images.pixel_values if self.parts.images else None
        batches = [packing.pack(members, read).to(self.parts.device) for members in mine]
        flops = sum(packing.microbatch_flops(members, self.parts.shape) for members in mine)
        tower = sum(packing.microbatch_tower_flops(members, self.parts.shape) for members in mine)
        return Update(batches, packing.divisor(groups), len(sequences), flops, tower)

    @phase("score")
    @torch.no_grad()
    def score(self, updates: list[Update]) -> None:
        """Once, the check of shared prompts; old and reference logprobs, each only where the loss needs them."""
        self.sharing_check.run(self.parts.policy, [batch for update in updates for batch in update.batches])
        config = self.config.updates
        several = len(updates) * config.epochs > 1
        for batch in (batch for update in updates for batch in update.batches):
            if config.old_logprobs == "rollout":
                batch.old_logprobs = batch.rollout_logprobs
            elif several:
                batch.old_logprobs, _ = self.parts.policy(batch)
            if self.parts.reference is not None:
                batch.ref_logprobs, _ = self.parts.reference(batch)

    @phase("update")
    def update(self, updates: list[Update]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Take the step's optimizer steps; return metrics that are the same on all ranks, and this rank's sums."""
        rate = learning_rate(self.config.optimizer, step=self.steps_done, total_steps=self.total_steps)
        for group in self.parts.optimizer.param_groups:
            group["lr"] = rate
        sums = {name: torch.zeros((), device=self.parts.device) for name in sum_names(self.objective)}
        norms: list[float] = []
        planned = updates * self.config.updates.epochs
        for update in planned:
            if update.sequences > 0:
                self._backward(update, sums)
                norms += self._optimizer_step()
        metrics = {
            "optimizer/lr": rate,
            "optimizer/updates": float(len(norms)),
            "optimizer/skipped": float(len(planned) - len(norms)),
            "optimizer/not_finite": float(sum(update.sequences > 0 for update in planned) - len(norms)),
        }
        if norms:
            metrics["optimizer/grad_norm"] = sum(norms) / len(norms)
        return metrics, sums

    def _backward(self, update: Update, sums: dict[str, Tensor]) -> None:
        # FSDP averages gradients over ranks: every rank divides by its share of the whole update's divisor.
        ranks = distributed.world_size()
        divisor = packing.Divisor(update.divisor.loss_tokens / ranks, update.divisor.loss_sequences / ranks)
        limit = self.config.rollout.max_completion_tokens
        always = self.config.updates.reduce_gradients == "microbatch"
        for number, batch in enumerate(update.batches, start=1):
            distributed.reduce_gradients(self.parts.policy, always or number == len(update.batches))
            evaluate = partial(
                policy_loss, batch=batch, objective=self.objective, divisor=divisor, max_completion_tokens=limit
            )
            loss, parts = self.parts.policy(batch, evaluate)
            loss.backward()
            for name, value in parts.items():
                sums[name] += value / ranks if name == "loss" else value

    def _optimizer_step(self) -> list[float]:
        """Clip and step; return the gradient norm, or nothing where it was not finite and the update was skipped."""
        parameters = self.parts.policy.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        finite = value < float("inf")
        if finite:
            self.parts.optimizer.step()
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.bad_gradients = 0 if finite else self.bad_gradients + 1
        if self.bad_gradients == BAD_GRADIENTS_IN_A_ROW:
            raise RuntimeError(
                f"step {self.steps_done + 1}: {BAD_GRADIENTS_IN_A_ROW} gradients in a row were not finite"
            )
        if not finite and self.parts.log:
            self.parts.log.say(f"step {self.steps_done + 1}: gradient norm is {value}; update skipped")
        return [value] if finite else []

    @phase("sync")
    def sync_sampler(self) -> None:
        """Hand the weights over. Raises ValueError, or sounds an alarm, where an engine's logprobs are then not the
        policy's."""
        self.sampler.load_weights(full_weights(self.parts.policy))
        if isinstance(self.parts.sampler, EngineSampler):
            problem = self.parity.run(self.parts.policy, self.parts.sampler)
            if problem and self.parts.log:
                self.parts.log.alarm(problem)
        self.sampler_steps = self.steps_done

    def refresh_sampler(self) -> None:
        """Hand the weights over unless the sampler has them."""
        if self.sampler_steps != self.steps_done:
            self.sync_sampler()

    def _report(self, collected: Collected, updates: list[Update], sums: dict[str, Tensor]) -> dict[str, float]:
        terms, groups = self.config.reward.terms, [*collected.groups, *collected.left_out]
        if self.config.log.rollouts:
            records = distributed.gather_to_first(step_report.rollout_records(groups, self.steps_done))
            if self.parts.log:
                self.parts.log.rollouts(records)
        flops = savings.flop_sums(
            groups,
            self.parts.shape,
            savings.Passes.of(self.config, updates=len(updates)),
            forward=sum(update.flops for update in updates),
            tower=sum(update.tower_flops for update in updates),
            longest_shared=self.longest_shared,
        )
        local = step_report.rollout_sums(groups, terms) | flops
        local |= {f"grader/{name}": float(count) for name, count in self.parts.grader.counters.items()}
        metrics = step_report.step_metrics(step_report.add_up(local, sums), terms)
        return metrics | savings.generation_saved(metrics, collected.counts["prompts/drawn"], self.config.budget)

    def _warn_of_window(self) -> None:
        tokens = self.config.data.max_prompt_tokens + self.config.rollout.max_completion_tokens
        if self.parts.log and 0 < self.longest_shared < tokens:
            self.parts.log.say(
                f"updates.share_prompts: the model's sliding window of {self.longest_shared} tokens does not cover "
                f"data.max_prompt_tokens + rollout.max_completion_tokens ({tokens}); longer rollouts get a prompt each"
            )
