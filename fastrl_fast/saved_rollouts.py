"""Graded groups that were not trained on yet, as tensors of a checkpoint and back."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .collect import Collected
from .types import Group, Prompt, Rollout

IDS, LOGPROBS, REST = "completion_ids", "rollout_logprobs", "rest"
_OF_ROLLOUT = [name for name in Rollout.__slots__ if name not in (IDS, LOGPROBS)]
_OF_GROUP = ["number", "weight", "dead"]


def to_tensors(collected: Collected) -> dict[str, Tensor]:
    """This rank's groups: completion_ids [tokens] int64, rollout_logprobs [tokens] float64 and, as JSON, the rest."""
    groups = [*collected.groups, *collected.left_out]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    records = [
        {"prompt": group.prompt.id}
        | {name: getattr(group, name) for name in _OF_GROUP}
        | {"rollouts": [_record(rollout) for rollout in group.rollouts]}
        for group in groups
    ]
    rest = json.dumps({"trained": len(collected.groups), "groups": records}).encode()
    return {
        IDS: torch.tensor(list(chain.from_iterable(r.completion_ids for r in rollouts)), dtype=torch.int64),
        LOGPROBS: torch.tensor(list(chain.from_iterable(r.rollout_logprobs for r in rollouts)), dtype=torch.float64),
        REST: torch.frombuffer(bytearray(rest), dtype=torch.uint8),
    }


def from_tensors(parts: list[dict[str, Tensor]], prompts: Mapping[str, Prompt]) -> Collected:
    """The groups of all `parts`, of these `prompts` by id; without counts, which are the same of all ranks."""
    collected = Collected(counts={})
    for part in parts:
        ids, logprobs = part[IDS].tolist(), part[LOGPROBS].tolist()
        rest = json.loads(part[REST].numpy().tobytes())
        groups, start = [], 0
        for record in rest["groups"]:
            group = Group(prompts[record["prompt"]], [], **{name: record[name] for name in _OF_GROUP})
            for fields in record["rollouts"]:
                end = start + fields.pop("tokens")
                group.rollouts.append(Rollout(ids[start:end], logprobs[start:end], **fields))
                start = end
            groups.append(group)
        collected.groups += groups[: rest["trained"]]
        collected.left_out += groups[rest["trained"] :]
    return collected


def _record(rollout: Rollout) -> dict[str, Any]:
    return {"tokens": len(rollout.completion_ids)} | {name: getattr(rollout, name) for name in _OF_ROLLOUT}
