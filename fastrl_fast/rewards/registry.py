"""Which rewards there are, by name; `find` knows a reward without loading it, `build` loads it in a worker."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import user
from .format import format_reward
from .gym import load_gym, reasoning_gym_reward
from .library import load_library
from .math import math_reward
from .plain import exact_reward, number_reward

RewardFunction = Callable[..., list[float | None]]


@dataclass(slots=True, frozen=True, kw_only=True)
class Reward:
    """One reward: its function in TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`.

    `one_by_one` rewards are called with one completion at a time, so that a hanging one is known at once.
    `needs` columns must be there, `takes` are handed over where they are there (None: all columns are).
    `load` runs once in every worker: imports and warms up what the first completion should not have to wait for.
    """

    name: str
    function: RewardFunction | None
    one_by_one: bool = False
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] | None = None
    load: Callable[[], Any] = lambda: None

    def columns(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The part of `columns` that this reward gets; ValueError where one that it needs is missing."""
        for column in self.needs:
            if column not in columns:
                raise ValueError(
                    f"reward {self.name!r} needs the column {column!r}; the data has: {', '.join(columns) or 'none'}"
                )
        if self.takes is None:
            return columns
        return {key: column for key, column in columns.items() if key in self.takes or key in self.needs}


_BUILT_IN = {
    reward.name: reward
    for reward in (
        Reward(
            name="math",
            function=math_reward,
            one_by_one=True,
            needs=("answer",),
            takes=("finish_reason", "choices"),
            load=load_library,
        ),
        Reward(name="exact", function=exact_reward, needs=("answer",), takes=()),
        Reward(name="number", function=number_reward, needs=("answer",), takes=()),
        Reward(name="format", function=format_reward, takes=()),
        Reward(
            name="reasoning_gym",
            function=reasoning_gym_reward,
            one_by_one=True,
            needs=("rg_dataset", "rg_entry"),
            takes=(),
            load=load_gym,
        ),
    )
}


def find(name: str) -> Reward:
    """The reward called `name`, not loaded: a built-in, or `[verl:|easyr1:]path/to/file.py:function`.

    Raises ValueError, naming what there is and the nearest name, where there is no such reward.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        return Reward(name=name, function=None, one_by_one=user.parse(name).style == "verl")
    near = difflib.get_close_matches(name, _BUILT_IN, n=1, cutoff=0.4)
    raise ValueError(
        f"unknown reward {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; built in: "
        f"{', '.join(_BUILT_IN)}; your own: path/to/file.py:function, verl:... or easyr1:... in front of it"
    )


def build(name: str) -> Reward:
    """The reward called `name`, loaded: with its function and all columns it needs; ValueError where it cannot be."""
    reward = find(name)
    if reward.function is None:
        function = user.load(name)
        return replace(reward, function=function, needs=user.needs(function))
    reward.load()
    return reward
