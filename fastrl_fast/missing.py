"""One line where a library that every command needs is not installed, instead of a traceback; standard library only."""

import importlib.util
import sys

NEEDED = (
    "torch",
    "transformers",
    "datasets",
    "jsonargparse",
    "math_verify",
    "mpmath",
    "numpy",
    "nvtx",
    "pyarrow",
    "rich",
    "safetensors",
    "yaml",
    "PIL",
    "jinja2",
)
"""What the package imports, as declared in pyproject.toml."""


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def stop_without_libraries() -> None:
    """Leave with exit code 2 and one line that says what to do."""
    if names := missing():
        line = f"error: not installed: {', '.join(names)}; run `pip install .` in the checkout of fastrl_fast"
        print(f"{line} (`python -m fastrl_fast.doctor` checks the rest)", file=sys.stderr, flush=True)
        sys.exit(2)
