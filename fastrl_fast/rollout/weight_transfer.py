"""How servers get the policy's weights: as files, or by vLLM's own transfer over NCCL."""

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..file_modes import open_weights
from .request import EngineLost
from .server_pool import Server, ServerPool

SHARD_BYTES = 1 << 30
TRANSFER_TIMEOUT = 600.0
"""Seconds for one call of a hand-over: a large model's weights take some."""

Named = Iterable[tuple[str, Tensor]]


class Transfer(Protocol):
    """A way to servers, on rank 0."""

    def send(self, named: Named, pool: ServerPool, servers: list[Server]) -> list[Server]:
        """Hand full tensors, by their transformers names, to `servers`; return those that took them."""
        ...


class FolderTransfer:
    """Writes safetensors of `dtype` to a folder that servers read, and has them load it by the extension of their
    workers in vllm_cpu.py."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._count = 0

    def send(self, named: Named, pool: ServerPool, servers: list[Server]) -> list[Server]:
        self._count += 1
        # A server may still have the last ones mapped.
        folder = self._folder / f"weights-{self._count % 2}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, shard in enumerate(_shards((name, tensor.to("cpu", self._dtype)) for name, tensor in named)):
            save_file(shard, folder / f"model-{number:05}.safetensors")
        open_weights(folder)
        call = {"method": "take_folder", "args": [str(folder.resolve())]}
        return [s for s in servers if pool.post(s, "/collective_rpc", call, timeout=TRANSFER_TIMEOUT) is not None]


def _shards(named: Named) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in named:
        shard[name] = tensor.contiguous()
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


class Meta(NamedTuple):
    """Name, dtype and whole shape of a weight, as vLLM asks for them before the first is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """vLLM's WeightSource: what is there to send, and one pass over it."""

    def __init__(self, metadata: list[Meta]) -> None:
        self._metadata = metadata
        self.named: Named = ()

    def metadata(self) -> list[Meta]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtypes = {meta.name: meta.dtype for meta in self._metadata}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return ((name, tensor.to(device, dtypes[name])) for name, tensor in self.named)


class ServersClient:
    """vLLM's VLLMWeightSyncClient for several servers: the HTTP interface of `vllm serve` 0.29 and newer, each call to
    all of them at once, whose workers are numbered through in the group of the transfer.

    A call raises EngineLost as soon as one server fails; `abort` then ends the broadcast to all, which would wait for
    it.
    """

    def __init__(self, pool: ServerPool, servers: list[Server], workers: list[int], abort: Callable[[], None]) -> None:
        self._pool, self._servers, self._workers, self._abort = pool, servers, workers, abort

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first, bodies = int(init_info["rank_offset"]), []
        for count in self._workers:
            bodies.append({"init_info": init_info | {"rank_offset": first}})
            first += count
        self._post_all("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post_all("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self._post_all("/update_weights", [{"update_info": update_info}] * len(self._servers))
        except Exception:
            self._abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post_all("/finish_weight_update")

    def _post_all(self, path: str, bodies: list[dict[str, Any]] | None = None) -> None:
        bodies = bodies or [{}] * len(self._servers)
        self._pool.post_to_all(self._servers, path, bodies, timeout=TRANSFER_TIMEOUT)


class NcclTransfer:
    """Broadcasts bucket by bucket over NCCL from this process's GPU to all workers of all servers, through vLLM's
    trainer-side engine; needs vLLM 0.29 or newer on both sides.

    `connect` makes that engine of (address, port, size of the group, client, source). A new one is made whenever the
    servers are others than before, or were restarted.
    """

    def __init__(self, metadata: list[Meta], connect: Callable[[str, int, int, Any, Any], Any] | None = None) -> None:
        self._weights = Weights(metadata)
        self._connect = connect or _connect
        self._engine: Any = None
        self._servers: list[str] = []

    def send(self, named: Named, pool: ServerPool, servers: list[Server]) -> list[Server]:
        """As `Transfer.send`. Raises EngineLost where a server fails in the middle: a broadcast has no way on."""
        try:
            return self._send(named, pool, servers)
        except EngineLost:
            self._servers = []
            raise
        except RuntimeError as error:  # of NCCL, or of its rendezvous
            self._servers = []
            raise EngineLost(f"the broadcast of weights failed: {error}") from error

    def _send(self, named: Named, pool: ServerPool, servers: list[Server]) -> list[Server]:
        # One that came back in the meantime is not in the group of its namesake.
        if self._servers != [server.url for server in servers] or not all(server.current for server in servers):
            sizes = [pool.get(server, "/get_world_size") for server in servers]
            servers = [server for server, size in zip(servers, sizes, strict=True) if size is not None]
            workers = [size["world_size"] for size in sizes if size is not None]
            if not servers:
                return []
            client = ServersClient(pool, servers, workers, self._abort)
            self._abort()
            address, port = _own_address(servers[0].url), _free_port()
            self._engine = self._connect(address, port, 1 + sum(workers), client, self._weights)
            self._servers = [server.url for server in servers]
        self._weights.named = named
        self._engine.send_weights()
        return servers

    def _abort(self) -> None:
        """End the group of the transfer, and whatever waits for it."""
        if self._engine is not None:
            self._engine.model_update_group.destroy()


def _connect(address: str, port: int, size: int, client: Any, source: Any) -> Any:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=size, rank=0, packed=True)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _own_address(url: str) -> str:
    """The address of this machine that the server at `url` reaches it by."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        name: str = probe.getsockname()[0]
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
