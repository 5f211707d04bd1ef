"""Reward functions in a user's own file, written for TRL, verl or EasyR1."""

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .answers import text_of

STYLES = ("trl", "verl", "easyr1")
_LARGEST = 1e30


@dataclass(slots=True, frozen=True, kw_only=True)
class UserName:
    """A reward's name taken apart: in which style the function is written, and where it is."""

    style: str
    path: str
    function: str


def parse(name: str) -> UserName:
    """Take `[style:]path/to/file.py:function` apart; ValueError where it is something else."""
    style, colon, rest = name.partition(":")
    if not colon or style not in STYLES:
        style, rest = "trl", name
    path, colon, function = rest.rpartition(":")
    if not colon or not path.endswith(".py") or not function.isidentifier():
        raise ValueError(
            f"reward {name!r}: expected path/to/file.py:function, with verl: or easyr1: in front if it is theirs"
        )
    return UserName(style=style, path=path, function=function)


def load(name: str) -> Callable[..., list[float | None]]:
    """Import the file and give the function in TRL's signature; ValueError says what is wrong and what is there."""
    target = parse(name)
    module = _import(name, target.path)
    function = getattr(module, target.function, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(
            f"reward {name!r}: {target.path} has no function {target.function!r}; it has: {', '.join(found) or 'none'}"
        )
    adapter = {"trl": _from_trl, "verl": _from_verl, "easyr1": _from_easyr1}[target.style]
    return adapter(name, function)


def needs(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns without which a function that `load` gave cannot be called: what a TRL function has a parameter for,
    without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return tuple(name for name in required if name not in ("prompts", "completions"))


def as_scores(name: str, result: Any, count: int, *, key: str | None = None) -> list[float | None]:
    """What a reward function returned for `count` completions, as floats; None for not-a-number, infinity and whatever
    is so large that its square would be.

    Lists, tuples and one-dimensional arrays or tensors will do, of numbers, booleans or None, and of dicts where the
    style has a `key` for the reward in them. Raises ValueError for anything else, and for a wrong number of values.
    """
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"reward {name!r}: expected a list of {count} values, got {_shown(result)}")
    if len(values) != count:
        raise ValueError(f"reward {name!r}: expected {count} values, one for each completion, got {len(values)}")
    return [_as_score(name, value, key) for value in values]


def _as_score(name: str, value: Any, key: str | None) -> float | None:
    if isinstance(value, dict):
        if key is None or key not in value:
            wanted = "numbers or None" if key is None else f"a number or a dict with the key {key!r}"
            raise ValueError(f"reward {name!r}: expected {wanted}, got a dict with the keys {list(value)}")
        value = value[key]
    if value is None:
        return None
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ValueError(f"reward {name!r}: expected numbers or None, got {_shown(value)}")
    return float(value) if abs(value) <= _LARGEST else None  # which neither infinity nor not-a-number is


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _import(name: str, path: str) -> ModuleType:
    full = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(full):
        raise ValueError(f"reward {name!r}: there is no file {full}")
    folder, file = os.path.split(full)
    if folder not in sys.path:
        sys.path.append(folder)  # its neighbours can be imported, but cannot hide a module of somebody else
    spec = importlib.util.spec_from_file_location(f"fastrl_user_{file.removesuffix('.py')}", full)
    assert spec and spec.loader, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise ValueError(f"reward {name!r}: {full} cannot be imported: {_where(error, full)}") from error
    return module


def _called(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call the user's function; what it raises comes back as a ValueError with its name and the line."""
    try:
        return function(*arguments, **keywords)
    except MemoryError:
        raise
    except BaseException as error:
        file = inspect.getsourcefile(function) if inspect.isroutine(function) else None
        raise ValueError(f"reward {name!r} raised {_where(error, file)}") from error


def _where(error: BaseException, file: str | None) -> str:
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    return f"{last} (line {own[-1].lineno}: {own[-1].line})" if own else last


def _accepted(function: Callable[..., Any], columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The arguments that the function has a parameter for; all of them where it has **keywords."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {key: column for key, column in columns.items() if key in parameters}


def _from_trl(name: str, function: Callable[..., Any]) -> Callable[..., list[float | None]]:
    def grade(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
        # As TRL does: the answer to a list of messages is a list of messages.
        completions = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) and isinstance(text, str) else text
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        arguments = {"prompts": prompts, "completions": completions, **columns}
        result = _called(name, function, **_accepted(function, arguments))
        return as_scores(name, result, len(completions))

    return functools.update_wrapper(grade, function, assigned=(), updated=())  # `needs` sees the user's parameters


def _gold(columns: dict[str, list[Any]], i: int) -> Any:
    """The right answer where verl and EasyR1 data keep it, then where ours does."""
    if "ground_truth" in columns:
        return columns["ground_truth"][i]
    if "reward_model" in columns and isinstance(columns["reward_model"][i], dict):
        return columns["reward_model"][i].get("ground_truth")
    return columns["answer"][i] if "answer" in columns else None


def _from_verl(name: str, function: Callable[..., Any]) -> Callable[..., list[float | None]]:
    def grade(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
        results = [
            _called(
                name,
                function,
                data_source=columns["data_source"][i] if "data_source" in columns else "",
                solution_str=text_of(completion),
                ground_truth=_gold(columns, i),
                extra_info=(columns["extra_info"][i] if "extra_info" in columns else None) or {},
            )
            for i, completion in enumerate(completions)
        ]
        return as_scores(name, results, len(completions), key="score")

    return grade


def _from_easyr1(name: str, function: Callable[..., Any]) -> Callable[..., list[float | None]]:
    """EasyR1 has two kinds, told apart by trying: list of dicts -> list of dicts, and dict -> dict."""
    declared = getattr(function, "__globals__", {}).get("REWARD_TYPE")
    state = {"sequential": declared == "sequential"}

    def grade(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
        inputs = [{"response": text_of(text), "ground_truth": _gold(columns, i)} for i, text in enumerate(completions)]
        if "completion_ids" in columns:
            for one, ids in zip(inputs, columns["completion_ids"], strict=True):
                one["response_length"] = len(ids)
        if not state["sequential"]:
            try:
                return as_scores(name, _called(name, function, inputs), len(inputs), key="overall")
            except ValueError as error:
                if declared == "batch":
                    raise
                refusal = error
            try:
                as_scores(name, [_called(name, function, inputs[0])], 1, key="overall")
            except ValueError as error:
                raise ValueError(f"{refusal}; and with a single dict: {error}") from error
            state["sequential"] = True
        results = [_called(name, function, one) for one in inputs]
        return as_scores(name, results, len(inputs), key="overall")

    return grade
