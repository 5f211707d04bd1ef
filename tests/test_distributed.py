"""Ranks agree on errors, share work without gaps, and end with their launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fastrl_fast import distributed


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 20])
def test_shares_cover_everything_once_and_evenly(monkeypatch: pytest.MonkeyPatch, ranks: int, count: int) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(list(range(count))[distributed.share(count)])
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_error_of_another_rank_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "gather_lists", lambda mine, group: [*mine, None, "theirs", "later"])
    with pytest.raises(ValueError, match=r"^theirs$"):
        distributed.together(lambda: 3)


def test_an_error_of_this_rank_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """cli.run tells a user's mistake from a defect of a library by where the error was raised."""
    gathered: list[list[str | None]] = []
    monkeypatch.setattr(distributed, "gather_lists", lambda mine, group: [gathered.append(mine), *mine][1:])
    with pytest.raises(ValueError, match="invalid literal") as raised:
        distributed.together(lambda: int("x"))
    assert raised.traceback[-1].frame.code.name == "<lambda>"
    assert len(gathered) == 1, "the other ranks wait for the message"
    assert distributed.together(lambda: 3) == 3


RANK = """
import os, time
from fastrl_fast import distributed
distributed.start()
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_rank_ends_with_a_launcher_that_was_killed() -> None:
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "test"}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], env=env, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    # The rank held the other end of the pipe, so this returns when it has ended, 60 s later at most.
    started = time.monotonic()
    assert launcher.stdout.read() == ""
    assert time.monotonic() - started < 30, f"rank {rank} outlived its launcher"
