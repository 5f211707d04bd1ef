"""Reads random settings without end: `python -m tests.fuzz.configs --seconds 600 [--seed 0]`.

Whatever is given is either a config that is read back as itself, or one line of ValueError; never another error, never
SLOW seconds, never more than MEMORY.
"""

import functools
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from fastrl_fast import cli, plain_yaml
from tests.fuzz.answers import main

SLOW, MEMORY = 20.0, 1 << 30
VALUES: tuple[Any, ...] = (0, 1, 2, -1, 3, 8, 10**9, 10**30, 0.5, 1.0, -0.1, 1e-6, float("nan"), float("inf"))
VALUES += (True, False, None, "", "x", "none", "1e-6", "0x10", "1_000", "no", "1:30")
VALUES += ([], [1], [0.9, 0.99], ["a"], {}, {"a": 1}, {"a": {"b": 1}})
VALUES += (
    "é\u2028",
    "\ud800",
    "a" * 10_000,
    "${oc.env:HOME}",
    "!!python/object:os.system",
    "{{x}}",
    "../../etc",
    "&a *a",
)
TEXTS = ("a: &a [*a]", "a: [1, 2", "\t", "- 1", "? ", "!!python/object/apply:os.getcwd []", "a: 1\na: 2")
TEXTS += ("\x00", "%YAML 9", "...", "---\n---")


def settings(draw: random.Random) -> dict[str, Any]:
    """A tree of some real keys and some wrong ones, with values of any type."""
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    keys = list(cli.known_keys())
    for _ in range(draw.randrange(5)):
        key = draw.choice(keys) if draw.random() < 0.9 else draw.choice(("nonsense", "model.pathh", "lr", "a.b.c", ""))
        place: Any = tree
        *sections, name = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        if isinstance(place, dict):
            place[name] = draw.choice(VALUES)
    return tree


def damaged(text: str, draw: random.Random) -> bytes:
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        if raw:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    return bytes(raw)


def arguments(draw: random.Random, file: Path) -> list[str]:
    kind = draw.random()
    if kind < 0.2:
        file.write_bytes(damaged(draw.choice(TEXTS), draw))
    elif kind < 0.7:
        file.write_bytes(damaged(yaml.safe_dump(settings(draw)), draw))
    argv = ["--config", str(file)] if kind < 0.7 else []
    for _ in range(draw.randrange(3)):
        key = draw.choice(list(cli.known_keys()) + ["nonsense", "config", ""])
        value = str(draw.choice(VALUES))
        argv += [f"--{key}={value}"] if draw.random() < 0.5 else [f"--{key}", value]
    return argv


def run(seconds: float, seed: int) -> dict[str, float]:
    """Raises AssertionError with the arguments that broke a rule."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    tried = read = 0
    slowest = 0.0
    cli._parser = functools.cache(cli._parser)  # building it takes a tenth of a second
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        while time.monotonic() < end:
            argv = arguments(draw, file)
            shown = (argv, file.read_bytes() if file.exists() else b"")
            started = time.monotonic()
            try:
                config, _ = cli.parse(argv, prog="fuzz")
            except ValueError as error:
                assert str(error).strip() and "\n" not in str(error), (shown, str(error))
            except (Exception, SystemExit) as error:
                raise AssertionError((shown, repr(error))) from error
            else:
                read += 1
                again = Path(folder) / "again.yaml"
                again.write_text(plain_yaml.dump(cli.to_dict(config)), encoding="utf-8")
                assert cli.parse(["--config", str(again)], prog="fuzz")[0] == config, shown
            tried += 1
            slowest = max(slowest, time.monotonic() - started)
            assert slowest < SLOW, shown
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < MEMORY, f"{peak / 1e6:.0f} MB"
    return {"tried": tried, "read": read, "slowest seconds": round(slowest, 3), "peak MB": round(peak / 1e6)}


if __name__ == "__main__":
    main(sys.argv[1:], run)
