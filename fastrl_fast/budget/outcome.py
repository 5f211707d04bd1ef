"""What a budget learns from a group: small enough to be gathered from all ranks."""

from dataclasses import dataclass

from ..drop_reasons import FREE
from ..types import Group


@dataclass(frozen=True, slots=True)
class Outcome:
    """One group of a step: how many rollouts were sampled, graded and right, whether all rewards were equal, how many
    stayed after pruning (those left out only because their gradient is zero included), and whether the group was
    trained on rather than filtered."""

    prompt_id: str
    generated: int
    graded: int
    right: int
    dead: bool
    stayed: int
    trained: bool

    @classmethod
    def of(cls, group: Group, *, trained: bool = True) -> "Outcome":
        graded = [rollout for rollout in group.rollouts if rollout.graded]
        rewards = [rollout.reward for rollout in graded]
        return cls(
            prompt_id=group.prompt.id,
            generated=len(group.rollouts),
            graded=len(graded),
            right=sum(rollout.right for rollout in graded),
            dead=len(rewards) < 2 or min(rewards) == max(rewards),
            stayed=sum(rollout.kept or rollout.drop_reason == FREE for rollout in group.rollouts),
            trained=trained,
        )
