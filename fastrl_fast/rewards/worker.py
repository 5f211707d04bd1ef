"""The program a grading worker runs: load the rewards, then answer calls until its parent is gone.

It starts in a fraction of a second because it imports neither torch nor transformers.
"""

import os
import resource
import signal
import warnings
from typing import Any, BinaryIO

from ..orphans import end_with_parent
from . import faults, wire
from .pool import Call, Load
from .registry import Reward, build

_MEMORY_EXIT = 77
"""Exit code of a worker that has reached its memory limit."""


def main(parent: int) -> None:
    """Serve the process `parent` over stdin and stdout; returns when the parent closes the pipe."""
    end_with_parent()  # elsewhere than on Linux the end of the pipe has to do
    if os.getppid() != parent:  # it died before the kernel was asked to tell us
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox, outbox = _take_pipes()
    warnings.filterwarnings("ignore")
    rewards: list[Reward] | None = None
    while True:
        try:
            message = wire.receive(inbox)
        except EOFError:
            return
        except Exception as error:  # a column holds an object whose class cannot be imported here
            _reply(outbox, ("raised", f"a grading worker cannot read the batch: {_one_line(error)}"))
            continue
        if rewards is None:
            try:
                rewards = _load(message)
            except Exception as error:
                _reply(outbox, ("failed", str(error) if isinstance(error, ValueError) else _one_line(error)))
                return
            _reply(outbox, ("loaded", [reward.needs for reward in rewards]))
            continue
        for call in message:
            _reply(outbox, _answer(rewards[call.term], call))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the two pipes out of the way, so that what a user's function prints or reads cannot break the protocol."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return inbox, outbox


def _load(load: Load) -> list[Reward]:
    rewards = [build(name) for name in load.names]
    # Memory it can write to, not address space: torch with CUDA reserves hundreds of gigabytes of that and uses none.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = load.memory_bytes if hard == resource.RLIM_INFINITY else min(load.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return rewards


def _answer(reward: Reward, call: Call) -> tuple[str, Any]:
    assert reward.function is not None, "built rewards have one"
    try:
        values = reward.function(call.prompts, call.completions, **call.columns)
        return "values", (values, faults.take_count())
    except MemoryError:
        os._exit(_MEMORY_EXIT)
    except ValueError as error:
        return "raised", str(error)
    except BaseException as error:
        return "raised", f"reward {call.name!r} raised {_one_line(error)}"


def _reply(outbox: BinaryIO, message: Any) -> None:
    outbox.write(wire.encode(message))
    outbox.flush()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
