"""SIGTERM and Ctrl-C: the run is saved and left by all ranks together; a second Ctrl-C ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from torch import Tensor

from . import distributed
from .rewards import Grader, Handle
from .rollout import EngineLost, Sampler
from .types import Group, Prompt, Rollout

T = TypeVar("T")


ENGINE_LOST_CODE = 3
"""Exit code of a run that was saved and left because nothing was left that samples."""
SECONDS_TO_RECALL = 0.1
"""A thread looks this often whether it was recalled."""


class Interrupted(Exception):
    """Every rank has agreed to leave the run, with exit code `code`: for a signal on one of them, or for `lost`, what
    became of its sampler."""

    def __init__(self, number: int, lost: str = "") -> None:
        super().__init__(signal.Signals(number).name if number else lost)
        self.number = number
        self.code = 128 + number if number else ENGINE_LOST_CODE


class _CutShort(BaseException):
    """Raised by the handler inside work that is thrown away; no `except Exception` of a library may hold it up."""


class Interrupt:
    """Whether this process was asked to stop, and what of its work a request ends at once.

    Sampling and grading may take minutes and leave nothing behind: they are cut short where they are, and what they
    would have returned is empty. All else runs on to the next `check`, where the ranks agree: a rank that left alone
    would leave the others waiting for it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.lost = ""
        self.wrong: ValueError | None = None
        """What this rank asked its sampler for and should not have: the others learn of it at the next check."""
        self._may_cut = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of both signals inside; one that is ignored, as in a job under nohup, stays ignored. In another
        thread than the main one there are no signals to take note of."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        with _second_ctrl_c_ends():
            for number, handler in before.items():
                if handler != signal.SIG_IGN:
                    signal.signal(number, self._asked)
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            if os.environ.get("RANK", "0") == "0":
                # print may be what was interrupted; the code shows the cursor that a progress bar hides.
                shown = "\x1b[?25h" if sys.stderr.isatty() else ""
                text = f"{shown}{signal.Signals(number).name}: saving, then ending; Ctrl-C again ends at once\n"
                os.write(2, text.encode())
        if self._may_cut:
            raise _CutShort

    def cut_short(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The result of `work`, or of `otherwise` where a request comes before it is done."""
        try:
            self._may_cut = True
            try:
                if self.number:
                    raise _CutShort
                return work()
            finally:
                self._may_cut = False
        except _CutShort:
            return otherwise()

    def check(self) -> None:
        """Raise Interrupted on every rank where any was asked to stop or lost its sampler, and ValueError where any
        asked its sampler for something wrong; all ranks call this together."""
        number, lost = max(distributed.gather_lists([(self.number, self.lost)]))
        if number or lost:
            raise Interrupted(number, lost)
        distributed.together(self._complain)

    def _complain(self) -> None:
        if self.wrong is not None:
            raise self.wrong


class CutShort(Protocol):
    """`Interrupt.cut_short`, or what does the same in another thread."""

    def __call__(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T: ...


class Recall:
    """Cuts short, once it is `asked`, what a thread does that no signal reaches."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        self._asked.set()

    def cut_short(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The result of `work`, or of `otherwise` where it is asked before that is done: `work` then ends unheard."""
        done: Future[T] = Future()
        threading.Thread(target=fulfil, args=(done, work), name="recallable", daemon=True).start()
        while not self._asked.is_set():
            if wait([done], timeout=SECONDS_TO_RECALL).done:
                return done.result()
        return otherwise()


def fulfil(promise: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work, and keep what it returns or raises."""
    try:
        promise.set_result(work())
    except BaseException as error:
        promise.set_exception(error)


@contextmanager
def _second_ctrl_c_ends() -> Iterator[None]:
    """Python runs its handlers in the main thread, which may be waiting for another rank inside a library: a thread
    is told of signals by their numbers in a pipe."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_count_ctrl_c, args=(reader,), name="ctrl-c", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _count_ctrl_c(reader: int) -> None:
    pressed = 0
    while numbers := os.read(reader, 64):
        pressed += numbers.count(signal.SIGINT)
        if pressed >= 2:
            os._exit(128 + signal.SIGINT)
    os.close(reader)


class InterruptibleSampler:
    """A sampler whose completions are all empty once the run was asked to stop, the engine was lost or a request was
    wrong: the next `Interrupt.check` ends the run."""

    def __init__(self, sampler: Sampler, interrupt: Interrupt, cut_short: CutShort | None = None) -> None:
        self._sampler, self._interrupt = sampler, interrupt
        self._cut_short = cut_short or interrupt.cut_short

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        with self._minding_the_engine():
            self._sampler.load_weights(named)

    def sample(self, prompts: list[Prompt], group_sizes: list[int], **settings: Any) -> list[Group]:
        def empty() -> list[Group]:
            sized = zip(prompts, group_sizes, strict=True)
            return [Group(prompt, [Rollout([], [], "length") for _ in range(size)]) for prompt, size in sized]

        with self._minding_the_engine():
            if self._interrupt.lost or self._interrupt.wrong:
                return empty()
            return self._cut_short(lambda: self._sampler.sample(prompts, group_sizes, **settings), empty)
        return empty()

    @contextmanager
    def _minding_the_engine(self) -> Iterator[None]:
        try:
            yield
        except EngineLost as lost:
            self._interrupt.lost = str(lost)
        except ValueError as wrong:
            self._interrupt.wrong = wrong


class InterruptibleGrader:
    """A grader that finds nothing gradable once the run was asked to stop."""

    def __init__(self, grader: Grader, cut_short: CutShort) -> None:
        self._grader, self._cut_short = grader, cut_short

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grader, name)

    def submit(self, prompts: list[Any], completions: list[Any], *rest: Any, **settings: Any) -> "InterruptibleHandle":
        handle = self._grader.submit(prompts, completions, *rest, **settings)
        nothing: dict[str, float | None] = {term.name: None for term in self._grader.terms}
        return InterruptibleHandle(handle, [nothing] * len(completions), self._cut_short)


class InterruptibleHandle:
    """A batch being graded, which nobody waits for once the run was asked to stop."""

    def __init__(self, handle: Handle, nothing: list[dict[str, float | None]], cut_short: CutShort) -> None:
        self._handle, self._nothing, self._cut_short = handle, nothing, cut_short

    def result(self) -> list[dict[str, float | None]]:
        return self._cut_short(self._handle.result, lambda: self._nothing)
