"""One grading worker as its parent sees it: start, send, receive before a deadline, kill with everything it started."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from . import wire

# The worker searches where its parent does, so both run the same version of this package and of the user's code.
_LAUNCH = "import sys; sys.path[:] = sys.argv[2:]; from fastrl_fast.rewards.worker import main; main(int(sys.argv[1]))"


class WorkerDied(Exception):
    """The worker process ended on its own: exit, crash, or its memory limit."""


class WorkerProcess:
    """A process running `fastrl_fast.rewards.worker.main`, in a session of its own.

    It must be started by a thread that lives as long as the worker should: on Linux the kernel kills the worker when
    the thread that started it ends (orphans.py), which is what leaves no orphans when the parent is killed -9.
    """

    def __init__(self) -> None:
        # One thread each: many workers that each start a thread per core would fight the sampler for the machine.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        assert self._popen.stdin and self._popen.stdout, "both pipes were asked for"
        self._to_worker, self._from_worker = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._to_worker, False)
        os.set_blocking(self._from_worker, False)
        self._inbox = wire.Inbox()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def dead(self) -> bool:
        """Whether it has ended by itself; it still has to be killed, for what it may have left running."""
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, message: Any, *, deadline: float) -> None:
        """Write one message; TimeoutError past `deadline` (time.monotonic seconds), WorkerDied if nobody reads."""
        left = memoryview(wire.encode(message))
        while left:
            self._wait(self._to_worker, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._to_worker, left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerDied(self._obituary()) from error

    def receive(self, *, deadline: float) -> Any:
        """Read one message; TimeoutError past `deadline` (time.monotonic seconds), WorkerDied when the pipe ends."""
        while (message := self._inbox.take()) is None:
            self._wait(self._from_worker, select.POLLIN, deadline)
            try:
                data = os.read(self._from_worker, 1 << 18)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerDied(self._obituary()) from error
            if not data:
                raise WorkerDied(self._obituary())
            self._inbox.feed(data)
        return message[0]

    def stop(self) -> None:
        """SIGKILL the worker and whatever runs in its process group; any thread may call it, at any time."""
        with self._lock:
            # Before the leader is reaped: afterwards the number of the group may be somebody else's.
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        """`stop`, then reap the worker and close the pipes; harmless when it is already gone."""
        self.stop()
        with self._lock:
            self._popen.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close this process's ends only: what a forked child does with a worker that belongs to its parent."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        poll = select.poll()
        poll.register(descriptor, event)
        if seconds <= 0 or not poll.poll(seconds * 1000):
            raise TimeoutError

    def _obituary(self) -> str:
        for _ in range(20):
            # WNOWAIT: not reaped here, as kill() needs the number to reach what the worker left running.
            info = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                break
            time.sleep(0.01)
        else:
            return "closed its pipe"
        how = "ended with exit code" if info.si_code == os.CLD_EXITED else "was ended by signal"
        return f"{how} {info.si_status}"
