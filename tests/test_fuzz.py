"""A few seconds of each fuzzer; `python -m tests.fuzz.answers --seconds 600` runs one for longer."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["answers", "configs"])
def test_a_few_seconds_of(name: str) -> None:
    """In a process of its own, whose memory is its own."""
    command = [sys.executable, "-m", f"tests.fuzz.{name}", "--seconds", "5", "--seed", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "peak MB" in done.stdout
