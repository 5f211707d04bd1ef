"""`fastrl train|evaluate|export|report|doctor ...`: all commands under one name, and their completion in a shell."""

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import sys
from typing import Any, Literal, NoReturn, get_args, get_origin

from . import __version__
from .missing import stop_without_libraries

COMMANDS = {
    "train": "train a model (on several processes: torchrun -m fastrl_fast.train)",
    "evaluate": "measure avg@k and pass@k of a run or a model on held-out prompts",
    "export": "write the newest checkpoint of a run as a Hugging Face folder",
    "report": "show runs as one HTML page and in numbers",
    "doctor": "check what this machine has, and that it works",
}
SHELLS = ("bash", "zsh", "tcsh", "fish")


def main() -> NoReturn:
    """Run a command as `python -m fastrl_fast.COMMAND` would, and exit with its code."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        sys.exit(0)
    if name == "--version":
        print(__version__)
        sys.exit(0)
    sys.argv = [f"fastrl {name}", *rest]
    if name == "doctor":
        sys.exit(_command(name, rest))
    stop_without_libraries()
    from . import cli  # only now: it needs some of them

    # Inside, so that Ctrl-C while torch is being imported is no traceback.
    cli.run(lambda: _command(name, rest))


def _command(name: str, rest: list[str]) -> int:
    if name == "completion":
        return print_completion(rest[0] if rest else "")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"fastrl: no command {name!r}{hint}; there are {', '.join(COMMANDS)}, completion")
    return importlib.import_module(f"{__package__}.{name}").main()


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    ending = "`fastrl COMMAND --help` explains each. `fastrl completion SHELL` prints a script that completes all this:"
    return "\n".join(["usage: fastrl COMMAND ...", "", *lines, "", ending, '  eval "$(fastrl completion bash)"'])


def print_completion(shell: str) -> int:
    """Print the shell's completion script. Raises ValueError for an unknown shell, or without shtab."""
    if shell not in SHELLS:
        raise ValueError(f"fastrl completion: the shell must be one of {', '.join(SHELLS)}, got {shell!r}")
    if importlib.util.find_spec("shtab") is None:
        raise ValueError("fastrl completion: shtab is not installed; pip install 'fastrl_fast[completion]'")
    import shtab

    print(shtab.complete(_parser(shtab.DIRECTORY), shell))
    return 0


def _parser(folder: Any) -> argparse.ArgumentParser:
    """All commands and options, for completion alone; `folder` completes folders."""
    from . import cli

    parser = argparse.ArgumentParser(prog="fastrl")
    commands = parser.add_subparsers()
    made = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    commands.add_parser("completion", help="print a completion script").add_argument("shell", choices=SHELLS)
    for name in ("train", "evaluate"):
        _add_settings(made[name])
    made["train"].add_argument(cli.DRY_RUN, action="store_true")
    places: dict[str, Any] = {"evaluate": {"nargs": "?"}, "export": {"nargs": 2}, "report": {"nargs": "+"}}
    for name, number in places.items():
        made[name].add_argument("run", **number).complete = folder  # type: ignore[attr-defined]
    for option in ("--out", "--png"):
        made["report"].add_argument(option).complete = folder  # type: ignore[attr-defined]
    made["report"].add_argument("--watch", action="store_true")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting as an option, with its values where these are few."""
    from . import cli

    parser.add_argument("--config", choices=cli.recipe_names())
    parser.add_argument("--print_config", action="store_true")
    for name, kind in cli.known_keys().items():
        if not dataclasses.is_dataclass(kind):
            choices = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else None
            parser.add_argument(f"--{name}", choices=choices)


if __name__ == "__main__":
    main()
