"""Process group, sharding, and the few collectives of a step; everything works with one process too."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from . import orphans

T = TypeVar("T")


def start() -> torch.device:
    """Join the process group that torchrun describes (or a group of one) and return this rank's device."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Without torchrun it would go on writing to the run's folder, and a restart would write beside it.
        orphans.end_with_parent()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=30)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def barrier() -> None:
    dist.barrier()


def divides(dtype: torch.dtype) -> bool:
    """Whether `shard` divides a model that computes in `dtype`: with one rank and float32 there is nothing to."""
    return world_size() > 1 or dtype != torch.float32


def shard(model: nn.Module, layers: list[nn.Module], *, dtype: torch.dtype, device: torch.device) -> None:
    """Move `model` to `device` and shard it over all ranks with FSDP2, each of `layers` as a unit of its own; computes
    in `dtype`, reduces in float32.

    FSDP2 moves unit by unit, so that a device never holds the whole model.
    """
    if not divides(dtype):
        model.to(device)
        return
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        # The backward pass begins with the last: to gather its weights twice in a row would be a waste.
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass adds up the gradients of all ranks, with those it finds; else each keeps its
    own, whole. The last of an update must."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_is_last_backward(now)


def share(count: int) -> slice:
    """This rank's part of `count` items; the parts' sizes differ by at most one."""
    size, longer = divmod(count, world_size())
    start = rank() * size + min(rank(), longer)
    return slice(start, start + size + (rank() < longer))


def side_group() -> dist.ProcessGroup | None:
    """A second group of all ranks, for a thread whose collectives must not meet the main thread's; None means the first
    and only rank. All ranks call this together."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def gather_lists(items: list[T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """The items of all ranks, in rank order, on every rank."""
    if world_size() == 1:
        return items
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def gather_to_first(items: list[T]) -> list[T]:
    """The items of all ranks, in rank order, on rank 0; nothing on the others."""
    if world_size() == 1:
        return items
    parts: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(items, parts)
    return [item for part in parts or () for item in part]


def all_sum(values: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over all ranks, on every rank."""
    if world_size() > 1:
        dist.all_reduce(values, group=group)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def together(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Do the same work on every rank; where it raises ValueError on any, every rank raises one.

    A rank raises its own, with its traceback, and one that had none the message of the first that had.
    """
    result, problem = None, None
    try:
        result = work()
    except ValueError as error:
        problem = error
    messages = gather_lists([None if problem is None else str(problem)], group=group)
    if problem is not None:
        raise problem
    for message in messages:
        if message is not None:
            raise ValueError(message)
    return cast(T, result)
