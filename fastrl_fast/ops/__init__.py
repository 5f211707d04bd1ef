"""Operators on ragged arrays, with no notion of reinforcement learning: each is one compiled pass."""

from fastrl_fast.ops.choose_rollouts import CHOICES, Choice, choose_rollouts, group_fidelity
from fastrl_fast.ops.fused_policy_loss import fused_policy_loss
from fastrl_fast.ops.gradient_sketch import gradient_sketch
from fastrl_fast.ops.group_advantage import PRESETS, group_advantage
from fastrl_fast.ops.importance import IMPORTANCE_KINDS, Importance, importance_weights
from fastrl_fast.ops.loss_settings import LossSettings
from fastrl_fast.ops.packed_logprobs import packed_logprobs
from fastrl_fast.ops.policy_loss import PolicyLossStats, policy_loss
from fastrl_fast.ops.selection import RULES, select_diverse
from fastrl_fast.ops.sequence_sums import sequence_sums
from fastrl_fast.ops.sharded_logprobs import Shard, sharded_logprobs

__all__ = [
    "CHOICES",
    "IMPORTANCE_KINDS",
    "PRESETS",
    "RULES",
    "Choice",
    "Importance",
    "LossSettings",
    "PolicyLossStats",
    "Shard",
    "choose_rollouts",
    "fused_policy_loss",
    "gradient_sketch",
    "group_advantage",
    "group_fidelity",
    "importance_weights",
    "packed_logprobs",
    "policy_loss",
    "select_diverse",
    "sequence_sums",
    "sharded_logprobs",
]
