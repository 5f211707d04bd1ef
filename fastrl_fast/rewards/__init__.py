"""Rewards: what a completion earns, worked out in killable processes so that no answer can stall a run.

    with Grader([RewardTerm("math", 1.0), RewardTerm("format", 0.5)], workers=2, timeout=5.0) as grader:
        values = grader.grade(prompts, completions, {"answer": golds})     # [{"math": 1.0, "format": 0.0}, ...]
        rewards = [total(grader.terms, value) for value in values]

Built in: `math`, `exact`, `number`, `format`, `reasoning_gym`; your own functions: `path/to/file.py:function` (TRL's
signature), `verl:path/to/file.py:compute_score`, `easyr1:path/to/file.py:compute_score`.
"""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan  # `import math` would be hidden by the submodule of that name
from typing import Any, Protocol

from .format import format_reward
from .gym import reasoning_gym_reward
from .math import equal, math_reward
from .plain import exact_reward, number_reward
from .pool import Batch, Call, Load, Pool
from .registry import Reward, find

__all__ = [
    "Grader",
    "Handle",
    "Term",
    "equal",
    "exact_reward",
    "format_reward",
    "math_reward",
    "number_reward",
    "overlong_penalty",
    "reasoning_gym_reward",
    "total",
]

_BUILT_IN_MEMORY = 4 << 30
_USER_MEMORY = 16 << 30
_SMALLEST_CHUNK = 8
_LARGEST_CHUNK = 64


class Term(Protocol):
    """A reward by name and its weight in the total."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...


def total(terms: Sequence[Term], values: Mapping[str, float | None]) -> float:
    """The reward of one completion: sum of weight * value; NaN, "could not be graded", where any term is None."""
    reward = 0.0
    for term in terms:
        value = values[term.name]
        reward += nan if value is None else term.weight * value
    return reward


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """0 up to `limit` - `buffer` tokens, falling from there to -1 at `limit` (DAPO, arXiv 2503.14476)."""
    return -max(0, length - (limit - buffer)) / buffer if buffer else 0.0


class Handle:
    """A batch being graded."""

    def __init__(self, batch: Batch, names: Sequence[str], count: int) -> None:
        self._batch, self._names, self._count = batch, names, count

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._batch.done

    def result(self) -> list[dict[str, float | None]]:
        """Wait, then {term name: value} for each completion; ValueError where a user's function misbehaved."""
        values = self._batch.result()
        return [{name: values[term, row] for term, name in enumerate(self._names)} for row in range(self._count)]


class Grader:
    """Grades batches of completions by a weighted list of rewards in `workers` processes.

    `timeout` is the wall-clock limit in seconds for one completion and one term: past it, or when a worker dies, the
    process is killed and replaced and only that completion gets 0.0 in that term. `math`, `reasoning_gym` and verl's
    functions see one completion at a time. Functions in TRL's and EasyR1's signature see whole groups (neighbours with
    the same prompt), several in one call, which may take `timeout` * max(1, completions / 4); past that its completions
    are graded one by one. `memory_bytes` limits a worker's memory (4 GiB, 16 GiB with a user's function).
    A user's function that raises, or returns something else than one number, bool or None for each completion, is a bug
    to mend: ValueError. Works from threads, asyncio (`await asyncio.to_thread(handle.result)`) and in forked children.
    Raises ValueError at construction for an empty list, an unknown or repeated name, or a file that cannot be loaded.
    """

    def __init__(self, terms: Sequence[Term], *, workers: int, timeout: float, memory_bytes: int | None = None) -> None:
        if not terms:
            raise ValueError("rewards: at least one reward is needed, got an empty list")
        if workers < 1:
            raise ValueError(f"rewards: workers must be at least 1, got {workers}")
        if not timeout > 0:
            raise ValueError(f"rewards: timeout must be above 0 seconds, got {timeout}")
        self.terms = tuple(terms)
        self._rewards: list[Reward] = [find(term.name) for term in terms]
        names = tuple(reward.name for reward in self._rewards)
        if len(set(names)) < len(names):
            raise ValueError(f"rewards: each may be named once, got {', '.join(names)}")
        if memory_bytes is None:
            memory_bytes = (
                _USER_MEMORY if any(reward.function is None for reward in self._rewards) else _BUILT_IN_MEMORY
            )
        self._load = Load(names=names, memory_bytes=memory_bytes)
        self._workers, self._timeout = workers, timeout
        self._lock = threading.Lock()
        self._open()
        self._rewards = [
            replace(reward, needs=needs) for reward, needs in zip(self._rewards, self._pool.needs, strict=True)
        ]

    def submit(
        self,
        prompts: list[Any],
        completions: list[Any],
        columns: Mapping[str, list[Any]],
        *,
        expected: int | None = None,
    ) -> Handle:
        """Start grading and return at once; `columns` holds one value per completion, such as `answer`.

        `expected` completions in all are to come in several submissions: calls are as large as for one of all.

        Rewards use: `answer` (math, exact, number), `finish_reason` (math), `rg_dataset` and `rg_entry`
        (reasoning_gym), `completion_ids` (EasyR1's response_length); a user's function gets every column. Raises
        ValueError for a column that is missing or of another length.
        """
        lengths = {"prompts": prompts, **columns}
        for name, column in lengths.items():
            if len(column) != len(completions):
                raise ValueError(f"rewards: {name} has {len(column)} entries for {len(completions)} completions")
        tasks = []
        for term, reward in enumerate(self._rewards):
            taken = reward.columns(dict(columns))
            size = self._chunk_size(expected or len(completions))
            calls = [
                Call(
                    term=term,
                    name=reward.name,
                    rows=tuple(range(start, end)),
                    prompts=prompts[start:end],
                    completions=completions[start:end],
                    columns={name: column[start:end] for name, column in taken.items()},
                )
                for start, end in _ranges(prompts, 1 if reward.one_by_one else size)
            ]
            step = size if reward.one_by_one else 1
            tasks += [calls[i : i + step] for i in range(0, len(calls), step)]
        return Handle(self._current_pool().submit(tasks), [reward.name for reward in self._rewards], len(completions))

    def grade(
        self, prompts: list[Any], completions: list[Any], columns: Mapping[str, list[Any]]
    ) -> list[dict[str, float | None]]:
        """`submit(...).result()`: {term name: value} for each completion, None where it could not be graded."""
        return self.submit(prompts, completions, columns).result()

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: completions that ran out of time or ended their worker, failed scorings, repeated calls."""
        counters = self._pool.counters
        return {name: getattr(counters, name) for name in ("timeouts", "worker_deaths", "errors", "retries")}

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return self._pool.worker_pids()

    def close(self) -> None:
        """End the workers; a batch that is still waited for raises RuntimeError."""
        self._finalizer()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        self._pool = Pool(self._load, workers=self._workers, timeout=self._timeout)
        self._finalizer = weakref.finalize(self, self._pool.close)

    def _current_pool(self) -> Pool:
        """The pool of this process: a fork copies neither its threads nor the right to its workers."""
        with self._lock:
            if self._pool.pid != os.getpid():
                self._finalizer()
                self._open()
            return self._pool

    def _chunk_size(self, count: int) -> int:
        return min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, count // (4 * self._workers)))


def _ranges(prompts: list[Any], size: int) -> list[tuple[int, int]]:
    """Cut the batch into ranges of at least `size` completions that part no neighbours with the same prompt.

    With size 1 every completion is a range of its own.
    """
    count = len(prompts)
    if size == 1:
        return [(i, i + 1) for i in range(count)]
    cuts = [0]
    for i in range(1, count):
        if i - cuts[-1] >= size and count - i >= size and prompts[i] != prompts[i - 1]:
            cuts.append(i)
    return list(zip(cuts, [*cuts[1:], count], strict=True)) if count else []
