"""The command line: recipes and files, dotted overrides, and one clear line for every mistake."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import select
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from .config import Config
from .foreign_names import VALUES, translate

DEFAULT_RECIPE = "demo"
CONFIG_HELP = f"A recipe or a YAML file, by default {DEFAULT_RECIPE}; of several the later ones count."
STDOUT = 1
DRY_RUN = "--dry_run"
"""Of train alone: no setting of a run, as it makes none."""

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


def recipe_names() -> list[str]:
    """Names of the recipes in the package, sorted."""
    folder = resources.files(__package__) / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_path(name_or_file: str) -> Path:
    """Return the file behind `--config NAME_OR_FILE`.

    Raises ValueError naming the recipes where it is neither a recipe nor a file.
    """
    if name_or_file.endswith((".yaml", ".yml")) or os.sep in name_or_file:
        path = Path(name_or_file)
        if not path.is_file():
            raise ValueError(f"--config: no such file {name_or_file!r}")
        return path
    if name_or_file not in recipe_names():
        near = _nearest(name_or_file, recipe_names())
        raise ValueError(f"--config: no recipe {name_or_file!r}{near}; recipes are {', '.join(recipe_names())}")
    return Path(str(resources.files(__package__) / "recipes" / f"{name_or_file}.yaml"))


def known_keys(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all settings with their types; a section stands before its settings, with its dataclass as
    type."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        keys[prefix + name] = kind
        if dataclasses.is_dataclass(kind):
            keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def _nearest(name: str, names: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _check_key(key: str, where: str) -> None:
    """Raise ValueError for a key that is no setting, with the nearest one or what it is called here."""
    keys = known_keys()
    settings = [name for name, kind in keys.items() if not dataclasses.is_dataclass(kind)]
    if key in settings or key.startswith("reward.functions."):
        return
    if key in keys:
        inside = ", ".join(name for name in settings if name.startswith(f"{key}."))
        raise ValueError(f"{where}: {key!r} is a section, set what is in it: {inside}")
    here = translate(key) or next((name for name in settings if name.endswith(f".{key}")), None)
    hint = f"; it is called {here!r} here" if here else _nearest(key, settings)
    raise ValueError(f"{where}: unknown key {key!r}{hint}")


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key != "reward.functions":
            yield from _flatten(value, f"{key}.")
        else:
            yield key


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that a mapping holds twice, where YAML's last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.MarkedYAMLError(problem=f"key {twice!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _check_file(path: Path) -> None:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8-sig"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"--config: {path} must hold a mapping of settings, got {tree!r:.40}")
    for key in _flatten(tree):
        _check_key(key, str(path))


def _parser(prog: str, about: str) -> jsonargparse.ArgumentParser:
    text = f"{about}Recipes: {', '.join(recipe_names())}."
    usage = f"{prog} [--config RECIPE_OR_FILE] [--SECTION.SETTING VALUE ...]"
    parser = jsonargparse.ArgumentParser(prog=prog, usage=usage, description=text, exit_on_error=False)
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    parser.add_class_arguments(Config, None)
    sections = {key for key, kind in known_keys().items() if dataclasses.is_dataclass(kind)}
    for action in parser._actions:
        if action.dest in sections:
            action.help = argparse.SUPPRESS  # a file for one section, which _check_key refuses
    return parser


def _checked_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments, files of recipes first so that overrides win, and the names given to --config."""
    files: list[str] = []
    out: list[str] = []
    recipes: list[str] = []
    args = iter(argv)
    for arg in args:
        if not arg.startswith("--"):
            out.append(arg)
            continue
        key, equals, value = arg[2:].partition("=")
        if key == "config":
            value = value if equals else next(args, "")
            path = recipe_path(value)
            _check_file(path)
            recipes.append(path.stem)
            files += ["--config", str(path)]
        else:
            if key not in ("help", "print_config"):
                _check_key(key, "command line")
            out.append(arg)
    if not recipes:
        recipes = [DEFAULT_RECIPE]
        files = ["--config", str(recipe_path(DEFAULT_RECIPE))]
    return files + out, recipes


def parse(argv: list[str], *, prog: str, about: str = "") -> tuple[Config, str]:
    """Return the resolved config and the name of its recipe (joined with + where several were given).

    Raises ValueError with one line naming the field, the rule and the value; --help and --print_config end the process.
    """
    checked, recipes = _checked_argv(argv)
    parser = _parser(prog, about)
    try:
        namespace = parser.instantiate(parser.parse_args(checked))
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(_one_line(error)) from error
    config = Config(**{field.name: namespace[field.name] for field in dataclasses.fields(Config)})
    _check_text(to_dict(config))
    return config, "+".join(recipes)


def _check_text(settings: dict[str, Any]) -> None:
    """Raise ValueError for half of a surrogate pair, as bytes that are not UTF-8 arrive from a shell: no file could
    hold it."""
    for key in _flatten(settings):
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} must be text that UTF-8 can hold, got {value!a}") from None


def _one_line(error: Exception) -> str:
    """The parser's message as "FIELD must be RULE, got VALUE", with the rule taken from the field's type."""
    text = " ".join(str(error).split())
    field, value = re.search(r'key "([\w.]+)"', text), re.search(r"(?:Got|Given) value: (.*)", text)
    if field is None or value is None or field[1] not in (keys := known_keys()):
        return text
    here = VALUES.get((field[1], value[1]))
    hint = f"; it is called {here!r} here" if here else ""
    return f"{field[1]} must be {_rule(keys[field[1]])}, got {value[1]}{hint}"


def _rule(kind: Any) -> str:
    """What a value of this type looks like, in words."""
    args = get_args(kind)
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _rule(arg) for arg in args)
    if origin is list:
        return f"a list, each {_rule(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {_rule(args[0])}"
    if origin is dict:
        return f"a mapping of names, each to {_rule(args[1])}"
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}[kind]


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dictionaries and lists."""
    tree = dataclasses.asdict(config)
    tree["optimizer"]["betas"] = list(config.optimizer.betas)
    return tree


def _raised_here(error: Exception) -> bool:
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return Path(innermost.f_code.co_filename).is_relative_to(Path(__file__).parent)


def _tell_torchrun(text: str) -> None:
    """Have torchrun's own report, under which the line would be lost, end with it: the file that it names to a rank is
    where it looks for what failed (torch.distributed.elastic.multiprocessing.errors)."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": failure}), encoding="utf-8")


def _reader_left() -> bool:
    """Whether it is the standard output that is read no longer, as by `head`, and not a pipe of somebody else's."""
    watched = select.poll()
    watched.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def run(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with its code.

    A ValueError that this package raised is a mistake of the user: one line on stderr and exit code 2. One that came
    out of another library is a defect and keeps its traceback.
    """
    try:
        code = main()
    except ValueError as error:
        if not _raised_here(error):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(f"error: {error}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what is still buffered
        code = 141
    sys.exit(code)
