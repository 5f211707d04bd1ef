"""The graded groups of a step: sampled, asked for more where the budget wants more, replaced where a filter takes
some."""

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from . import distributed
from .accuracy import RIGHT
from .budget import Budget, Outcome
from .config import Config
from .data import PromptData
from .drop_reasons import FILTERED, SURPLUS, UNGRADED
from .grading import Grading
from .metrics import Clock, phase
from .rewards import Grader, overlong_penalty, total
from .rollout import Sampler
from .types import Group

INDICES_PER_TRY = 1 << 32
"""A prompt that comes again at a later try of the same step draws other completions: its indices start higher."""


COUNTS = ("prompts/drawn", "prompts/skipped", "collect/tries", "collect/rounds")
"""Prompts taken from the data, those of them that the budget skipped, tries, and rounds of sampling."""


class ShortStep(ValueError):
    """The tries of a step ran out, on all ranks alike."""


@dataclass(slots=True)
class Collected:
    """This rank's groups to train on, its groups that were left out, and counts that are the same on all ranks."""

    groups: list[Group] = field(default_factory=list)
    left_out: list[Group] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))

    def outcomes(self) -> list[Outcome]:
        """What budgets learn from."""
        return [Outcome.of(g) for g in self.groups] + [Outcome.of(g, trained=False) for g in self.left_out]


class Collector:
    """Collects the groups of a step; every loop's number of turns is agreed over all ranks.

    Without a filter and with a budget that neither skips nor extends this is one call of the sampler and one of the
    grader. In another thread than the main one it needs a `group` of ranks of its own.
    """

    def __init__(
        self,
        config: Config,
        data: PromptData,
        sampler: Sampler,
        grader: Grader,
        budget: Budget,
        clock: Clock,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.sampler = sampler
        self.grader = grader
        self.budget = budget
        self.clock = clock
        self.group = group

    def collect(self, step: int) -> Collected:
        """The groups of step `step` (from 0). Raises ValueError where the tries run out and the config says stop."""
        settings, target = self.config.budget, self.config.data.prompts_per_step
        collected = Collected()
        found = 0
        for attempt in range(settings.tries):
            missing = target - found
            if settings.filter:
                missing = self.budget.prompts_to_draw(missing, target=target)
            groups = self._sampled(missing, step, attempt, collected)
            found += self._take(groups, target - found, collected)
            collected.counts["collect/tries"] += 1
            if found == target:
                break
        if found < target:
            self._short(found, collected)
        return collected

    def _sampled(self, count: int, step: int, attempt: int, collected: Collected) -> list[Group]:
        """This rank's share of groups for `count` further prompts, or fewer where the budget skips some; graded, with
        all their rounds."""
        prompts = self.data.next_prompts(count)
        sizes = self.budget.plan(prompts, step=step)
        planned = [(prompt, size) for prompt, size in zip(prompts, sizes, strict=True) if size > 0]
        first_number = int(collected.counts["prompts/drawn"])
        collected.counts["prompts/drawn"] += len(prompts)
        collected.counts["prompts/skipped"] += len(prompts) - len(planned)
        if not planned:
            return []
        mine = distributed.share(len(planned))
        groups = [
            Group(prompt, [], number=first_number + place, weight=self.budget.weight(prompt))
            for place, (prompt, _) in enumerate(planned[mine], start=mine.start)
        ]
        wanted = [size for _, size in planned[mine]]
        while True:
            asked = [group.prompt for group, size in zip(groups, wanted, strict=True) if size > 0]
            grading = Grading(self.grader, asked, expected=sum(wanted))
            self.sample(groups, wanted, grading, step=step, attempt=attempt)
            self.grade(grading)
            collected.counts["collect/rounds"] += 1
            wanted = self.budget.extend(groups)
            if not self._anywhere(sum(wanted)):
                return groups

    @phase("sample")
    def sample(self, groups: list[Group], wanted: list[int], grading: Grading, *, step: int, attempt: int) -> None:
        """Add `wanted` further rollouts to each group, which are being graded from then on; randomness goes on where a
        group stands."""
        pairs = [(group, size) for group, size in zip(groups, wanted, strict=True) if size > 0]
        for present in sorted({len(group.rollouts) for group, _ in pairs}):
            alike = [(group, size) for group, size in pairs if len(group.rollouts) == present]
            sampled = self.sampler.sample(
                [group.prompt for group, _ in alike],
                [size for _, size in alike],
                seed=self.config.seed,
                step=step,
                first_index=attempt * INDICES_PER_TRY + present,
                finished=grading.add,
            )
            for (group, _), more in zip(alike, sampled, strict=True):
                group.rollouts += more.rollouts

    @phase("grade")
    def grade(self, grading: Grading) -> None:
        """Wait for the rewards and set them, their weighted sum, and right or wrong."""
        decides = self.config.reward.right_name
        for group, graded in distributed.together(grading.result, group=self.group):
            for rollout, rewards in zip(group.rollouts, graded, strict=True):
                rollout.rewards = rewards
                rollout.reward = total(self.config.reward.terms, rewards) + overlong_penalty(
                    len(rollout.completion_ids),
                    limit=self.config.rollout.max_completion_tokens,
                    buffer=self.config.reward.overlong_buffer,
                )
                value = rewards[decides]
                rollout.right = value is not None and value >= RIGHT

    def _take(self, groups: list[Group], needed: int, collected: Collected) -> int:
        """Sort groups into those to train on and those left out; return how many were taken on all ranks."""
        passed = [group.number for group in groups if self._passes(group)]
        taken = set(sorted(distributed.gather_lists(passed, group=self.group))[:needed])
        for group in groups:
            if group.number in taken:
                collected.groups.append(group)
            else:
                _leave_out(group, SURPLUS if group.number in passed else FILTERED, collected)
        return len(taken)

    def _passes(self, group: Group) -> bool:
        settings = self.config.budget
        if not settings.filter:
            return True
        graded = [rollout for rollout in group.rollouts if rollout.graded]
        values = [float(r.right) if settings.filter_on == "right" else r.reward for r in graded]
        return bool(values) and settings.filter_low < sum(values) / len(values) < settings.filter_high

    def _anywhere(self, count: int) -> bool:
        """Whether any rank counts something."""
        return bool(distributed.all_sum(torch.tensor(float(count)), group=self.group) > 0)

    def _short(self, found: int, collected: Collected) -> None:
        """The tries ran out: do what the config says, the same on every rank."""
        settings = self.config.budget
        if settings.when_short == "stop":
            raise ShortStep(
                f"budget.tries must be greater than {settings.tries} for this data, or budget.when_short other than "
                f"stop: {found} of {self.config.data.prompts_per_step} groups were found for a step"
            )
        if settings.when_short == "skip":
            for group in collected.groups:
                _leave_out(group, SURPLUS, collected)
            collected.groups = []


def _leave_out(group: Group, reason: str, collected: Collected) -> None:
    group.dead = Outcome.of(group).dead
    for rollout in group.rollouts:
        rollout.drop_reason = reason if rollout.graded else UNGRADED
    collected.left_out.append(group)
