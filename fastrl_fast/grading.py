"""Grading that goes on in its processes while further groups are still sampled."""

from collections.abc import Set as AbstractSet
from typing import Any

from .rewards import Grader, Handle
from .types import Group, Prompt, Rollout

PARTS = 8
"""Groups are handed over in about this many lots: a call for each one would cost reward functions their batches."""

Values = dict[str, float | None]


class Grading:
    """The groups of one sampling of `prompts`, `expected` rollouts in all, graded in the order in which they are
    added."""

    def __init__(self, grader: Grader, prompts: list[Prompt], *, expected: int) -> None:
        self._grader = grader
        self._expected = expected
        self._columns = {name for prompt in prompts for name in prompt.columns}
        self._waiting: list[Group] = []
        self._lots: list[tuple[list[Group], Handle]] = []
        self._problem: ValueError | None = None

    def add(self, group: Group) -> None:
        """Take a group whose rollouts are complete; grading it starts once there are enough for a lot."""
        # Without a rollout there are no columns either, which the grader would call missing.
        if group.rollouts:
            self._waiting.append(group)
        if sum(len(waiting.rollouts) for waiting in self._waiting) * PARTS >= self._expected:
            self._hand_over()

    def result(self) -> list[tuple[Group, list[Values]]]:
        """Wait, then each group with the values of its rollouts.

        Raises ValueError for a reward function that misbehaved; here and not in `add`, so that a rank that meets one
        still samples to the end as the others do.
        """
        self._hand_over()
        if self._problem is not None:
            raise self._problem
        graded = []
        for groups, handle in self._lots:
            values = iter(handle.result())
            graded += [(group, [next(values) for _ in group.rollouts]) for group in groups]
        return graded

    def _hand_over(self) -> None:
        groups, self._waiting = self._waiting, []
        if groups and self._problem is None:
            columns = grading_columns(groups, self._columns)
            try:
                self._lots.append((groups, self._grader.submit(*columns, expected=self._expected)))
            except ValueError as error:
                self._problem = error


def grading_columns(
    groups: list[Group], known: AbstractSet[str] = frozenset()
) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """Prompts, completions and columns of all rollouts, in order, as reward functions take them.

    Where the data held chat messages, a prompt is the list of messages and a completion a list of one message, as in
    TRL. Columns are the `known` ones and those that any prompt has (a prompt without one gives None), `completion_ids`
    and `finish_reason`.
    """
    prompts: list[Any] = []
    completions: list[Any] = []
    rows: list[dict[str, Any]] = []
    for group in groups:
        chat = not isinstance(group.prompt.text, str)
        for rollout in group.rollouts:
            prompts.append(group.prompt.text)
            completions.append([{"role": "assistant", "content": rollout.text}] if chat else rollout.text)
            sampled = {"completion_ids": rollout.completion_ids, "finish_reason": rollout.finish_reason}
            rows.append(group.prompt.columns | sampled)
    names = sorted({name for row in rows for name in row} | (known if rows else set()))
    return prompts, completions, {name: [row.get(name) for row in rows] for name in names}


def empty_columns(prompts: list[Prompt]) -> dict[str, list[Any]]:
    """The columns that reward functions get for rollouts of these prompts, of which there must be one, without any
    values: enough to tell which are missing."""
    known = {name for prompt in prompts for name in prompt.columns}
    _, _, columns = grading_columns([Group(prompts[0], [Rollout([], [], "stop")])], known)
    return {name: [] for name in columns}
