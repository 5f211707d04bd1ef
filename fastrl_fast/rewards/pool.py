"""A pool of killable worker processes: no call can stall it, and a call that kills its worker spoils only itself."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from .process import WorkerDied, WorkerProcess

_log = logging.getLogger("fastrl_fast.rewards")

LOAD_SECONDS = 120.0
"""How long a worker may take to import the rewards; a user's file may import something large."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """What a worker is told first: the rewards to load, in the order of their terms, and its limit of memory."""

    names: tuple[str, ...]
    memory_bytes: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """One call of one reward term on some completions: `rows` are their places in the batch, the lists run parallel."""

    term: int
    name: str
    rows: tuple[int, ...]
    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]

    def split(self) -> list["Call"]:
        """The same work as one call per completion."""
        return [
            Call(
                term=self.term,
                name=self.name,
                rows=(row,),
                prompts=self.prompts[i : i + 1],
                completions=self.completions[i : i + 1],
                columns={key: column[i : i + 1] for key, column in self.columns.items()},
            )
            for i, row in enumerate(self.rows)
        ]


class Batch:
    """The calls of one submission and what has come back of them; any thread may wait for it."""

    def __init__(self, calls: int) -> None:
        self._lock = threading.Lock()
        self._missing = calls
        self._values: dict[tuple[int, int], float | None] = {}
        self._error: Exception | None = None
        self._done = threading.Event()
        if not calls:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def deliver(self, call: Call, values: list[float | None]) -> None:
        with self._lock:
            self._values.update(((call.term, row), value) for row, value in zip(call.rows, values, strict=True))
            self._missing -= 1
            if not self._missing:
                self._done.set()

    def expect(self, more: int) -> None:
        with self._lock:
            self._missing += more

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._done.set()

    def result(self) -> dict[tuple[int, int], float | None]:
        """Wait, then the value of each (term, row); raises what a call raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._values


@dataclass(slots=True)
class Counters:
    """What went wrong since the pool was opened."""

    timeouts: int = 0
    worker_deaths: int = 0
    errors: int = 0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + count)


class Pool:
    """`workers` processes that have loaded the same rewards, each served by a thread of its own.

    A worker answers call by call, so the parent always knows which call is being worked on. A call may take `timeout`
    seconds, one with n > 4 completions `timeout` * n / 4: long enough for an ordinary batch, and a hang is found in a
    few timeouts. When it takes longer, or its worker dies, the worker is killed and replaced; a call with several
    completions is then repeated one by one, a call with one completion gets `spoilt` (0.0).
    Raises ValueError where the rewards cannot be loaded.
    """

    def __init__(self, load: Load, *, workers: int, timeout: float) -> None:
        self._load, self._timeout = load, timeout
        self.pid = os.getpid()
        self.counters = Counters()
        self.needs: list[tuple[str, ...]] = []
        """Columns that each reward cannot do without, as a worker found when it loaded them."""
        self._tasks: queue.SimpleQueue[tuple[Batch, list[Call]] | None] = queue.SimpleQueue()
        self._processes: dict[int, WorkerProcess] = {}
        self._closing = False
        self._lock = threading.Lock()
        self._batches: set[Batch] = set()
        loaded: Future[None] = Future()
        self._threads = [
            threading.Thread(target=self._serve, args=(i, loaded), name=f"grader-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            loaded.result()
        except BaseException:
            self.close()
            raise

    def submit(self, tasks: list[list[Call]]) -> Batch:
        """Queue the calls; each inner list goes to one worker, and the rest of it moves on when that worker dies."""
        batch = Batch(sum(map(len, tasks)))
        with self._lock:
            if self._closing:
                raise RuntimeError("the grader is closed")
            self._batches = {other for other in self._batches if not other.done} | {batch}
        for calls in tasks:
            self._tasks.put((batch, calls))
        return batch

    def worker_pids(self) -> list[int]:
        return [process.pid for process in list(self._processes.values())]

    def close(self) -> None:
        """Kill the workers and end the threads; what was still waited for raises RuntimeError."""
        if self.pid != os.getpid():  # a forked child has the pipes but not the threads, and the workers are not its own
            for process in self._processes.values():
                process.close_pipes()
            return
        with self._lock:
            self._closing = True
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + 10
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            # Again and again: a thread may be starting a worker right now.
            for process in list(self._processes.values()):
                process.stop()
            for thread in self._threads:
                thread.join(0.05)
        for batch in self._batches:
            if not batch.done:
                batch.fail(RuntimeError("the grader was closed before it had finished"))

    def _serve(self, index: int, loaded: "Future[None]") -> None:
        try:
            with contextlib.suppress(InvalidStateError):  # the first worker decides for all
                try:
                    self._start(index)
                    loaded.set_result(None)
                except Exception as error:
                    loaded.set_exception(error)
            while (task := self._tasks.get()) is not None and not self._closing:
                batch, calls = task
                if batch.done:  # it has failed: nobody waits for the rest
                    continue
                try:
                    self._work(index, batch, deque(calls))
                except Exception as error:
                    batch.fail(error)
                    self._stop(index)  # it may still have answers to give that nobody waits for
        finally:
            self._stop(index)

    def _start(self, index: int) -> WorkerProcess:
        process = self._processes.get(index)
        if process is not None and process.dead:  # while it had nothing to do, so no completion is to blame
            self._stop(index)
            self.counters.add("worker_deaths")
            process = None
        if process is None:
            process = self._processes[index] = WorkerProcess()
            deadline = time.monotonic() + LOAD_SECONDS
            try:
                process.send(self._load, deadline=deadline)
                kind, said = process.receive(deadline=deadline)
            except TimeoutError:
                self._stop(index)
                raise ValueError(f"the rewards could not be loaded within {LOAD_SECONDS:.0f} s") from None
            except WorkerDied as death:
                self._stop(index)
                raise ValueError(
                    f"a grading worker {death} while it loaded the rewards; see its output above"
                ) from None
            if kind == "failed":
                self._stop(index)
                raise ValueError(said)
            self.needs = said
        return process

    def _stop(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.kill()

    def _work(self, index: int, batch: Batch, calls: deque[Call]) -> None:
        """Have the calls done; returns early, with the rest queued again, when one of them ended the worker."""
        process = self._start(index)
        try:
            process.send(list(calls), deadline=time.monotonic() + LOAD_SECONDS)
            while calls:
                kind, value = process.receive(deadline=time.monotonic() + self._seconds(calls[0]))
                if kind == "raised":
                    self.counters.add("errors")
                    raise ValueError(value)
                values, errors = value
                self.counters.add("errors", errors)
                batch.deliver(calls.popleft(), values)
        except (TimeoutError, WorkerDied) as failure:
            self._stop(index)
            if not self._closing:
                self._after_failure(batch, calls, failure)

    def _seconds(self, call: Call) -> float:
        return self._timeout * max(1.0, len(call.rows) / 4)

    def _after_failure(self, batch: Batch, calls: deque[Call], failure: Exception) -> None:
        call = calls.popleft()
        late = isinstance(failure, TimeoutError)
        what = f"took more than {self._seconds(call):g} s" if late else f"ended its worker, which {failure}"
        if len(call.rows) > 1:
            self.counters.add("retries")
            _log.warning(
                "reward %s: a call with %d completions %s; they are graded one by one", call.name, len(call.rows), what
            )
            singles = call.split()
            batch.expect(len(singles) - 1)
            calls.extend(singles)
        else:
            self.counters.add("timeouts" if late else "worker_deaths")
            _log.warning("reward %s: completion %d %s and gets 0.0", call.name, call.rows[0], what)
            batch.deliver(call, [0.0])
        if calls:
            self._tasks.put((batch, list(calls)))
