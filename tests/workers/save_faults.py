"""Breaks a save at each of its file operations in turn and prints one JSON line for each: what a resumed run finds.

Usage: save_faults.py FOLDER
crash: the process ends there and then, as by kill -9 or a power cut. error: the operation raises "no space left".
Every try is a fork of this process, which has started no thread.
"""

import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastrl_fast import distributed
from fastrl_fast.checkpoint import Checkpointer, checkpointer, complete, shards

WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
"""Audit events of Python whose first argument is a path; fsync and safetensors' own writing are added by hand."""


class Fault:
    """Counts operations once armed, and breaks the one numbered `at`."""

    def __init__(self, folder: Path, at: int, kind: str) -> None:
        self.folder, self.at, self.kind = str(folder), at, kind
        self.count, self.armed, self.what = 0, False, ""
        # The audit hook of a removal inside a removal must not count on another thread's behalf.
        self.lock = threading.RLock()

    def here(self, what: str, partly: Callable[[], None] = lambda: None) -> None:
        with self.lock:
            if not self.armed:
                return
            self.count += 1
            if self.count != self.at:
                return
            self.armed, self.what = False, what
            partly()
            if self.kind == "crash":
                os._exit(9)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self) -> None:
        def hook(event: str, arguments: tuple) -> None:
            if event in WATCHED and str(arguments[0]).startswith(self.folder):
                self.here(f"{event} {Path(str(arguments[0])).name}")

        sync, save_file = os.fsync, shards.save_file

        def faulty_sync(descriptor: int) -> None:
            self.here("fsync")
            sync(descriptor)

        def faulty_save(tensors: dict, path: Path) -> None:
            def half() -> None:
                save_file(tensors, path)
                os.truncate(path, path.stat().st_size // 2)

            self.here("write half a file", half)
            save_file(tensors, path)

        sys.addaudithook(hook)
        os.fsync = checkpointer.os.fsync = faulty_sync
        shards.save_file = faulty_save


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
    return model, optimizer


def attempt(folder: Path, at: int, kind: str) -> dict:
    """Two good saves, then one that is broken at operation `at`; only an error comes back from here."""
    distributed.start()
    saver = Checkpointer(folder, keep=1)
    for step in (1, 2):
        saver.save(step, *trained(step), {})
        saver.wait()
    fault = Fault(folder, at, kind)
    fault.install()
    fault.armed = True
    message = ""
    try:
        saver.save(3, *trained(3), {})
        saver.wait()
    except ValueError as error:
        message = str(error)
    fault.armed = False
    return {"hit": fault.what, "message": message}


def what_is_left(folder: Path) -> dict:
    """What a new process resumes from, whether it is what was saved, and whether the next save works."""
    distributed.start()
    saver = Checkpointer(folder, keep=1)
    model, optimizer = trained(0)
    state = saver.load_newest(model, optimizer)
    assert state is not None
    truth, moments = trained(state["step"])
    right = all(torch.equal(a, b) for a, b in zip(model.parameters(), truth.parameters(), strict=True))
    for ours, theirs in zip(optimizer.state.values(), moments.state.values(), strict=True):
        right &= all(torch.equal(ours[key], theirs[key]) for key in theirs)
    saver.save(4, *trained(4), {})
    saver.wait()
    after = [path.name for path in complete(folder)]
    return {"step": state["step"], "right": right, "after": after, "files": sorted(os.listdir(folder))}


def forked(work: Callable[[], dict]) -> dict:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {}


def break_every_operation(root: Path, kind: str) -> None:
    at = 0
    while True:
        at += 1
        folder = root / f"{kind}{at}"
        told = forked(lambda: attempt(folder, at, kind))  # noqa: B023, it is called at once
        left = forked(lambda: what_is_left(folder))  # noqa: B023
        print(json.dumps({"kind": kind, "at": at, **told, **left}), flush=True)
        if told and not told["hit"]:
            return


def main() -> None:
    torch.set_num_threads(1)
    trained(1)  # what it imports is imported once
    for kind in ("crash", "error"):
        break_every_operation(Path(sys.argv[1]), kind)


if __name__ == "__main__":
    main()
