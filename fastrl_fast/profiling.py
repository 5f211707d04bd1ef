"""What profilers are given: a range around each step, and the trace of the steps that `log.profile_steps` names."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import nvtx
import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def step_range(step: int, trace_folder: Path | None) -> Iterator[None]:
    """Show what runs inside as the range `step N` of the domain `fastrl_fast`, by which nsys and ncu find it.

    With a folder, write what torch's profiler saw to step-N.json.gz in it: operators with their shapes and, as
    `user_annotation`, the phases of metrics.PHASES; on a GPU its kernels too. Raises ValueError where it cannot be
    written.
    """
    # Of the whole process, unlike the phases': autograd launches the kernels of a backward pass from another thread.
    range_id = nvtx.start_range(f"step {step}", domain="fastrl_fast")
    try:
        with _recorded(step, trace_folder) if trace_folder else nullcontext():
            yield
    finally:
        nvtx.end_range(range_id)


@contextmanager
def _recorded(step: int, folder: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as recorded:
        yield
    path = folder / f"step-{step}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
    except OSError as error:
        raise ValueError(f"run_dir: cannot write {path}: {error}") from error
