"""Weights on their way to servers: files, and the calls of vLLM's own transfer, whose NCCL a stub stands for here."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_vllm import FakeServer, _Handler
from safetensors.torch import load_file

from fastrl_fast.builtin import resolve_model
from fastrl_fast.config import ModelConfig, RolloutConfig
from fastrl_fast.model import build_policy, full_weights, load_tokenizer
from fastrl_fast.rollout import EngineLost
from fastrl_fast.rollout.server_pool import ServerPool
from fastrl_fast.rollout.vllm_server import build_servers
from fastrl_fast.rollout.weight_transfer import FolderTransfer, Meta, NcclTransfer
from fastrl_fast.rollout_config import VllmConfig

WEIGHTS = {"embed": torch.arange(6.0).reshape(2, 3), "norm": torch.tensor([0.25, 1.5])}
METADATA = [Meta(name, torch.bfloat16, tuple(weight.shape)) for name, weight in WEIGHTS.items()]


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made = [FakeServer(), FakeServer()]
    yield made
    for server in made:
        server.die()


@pytest.fixture
def pool(servers: list[FakeServer]) -> Iterator[ServerPool]:
    made = ServerPool([server.url for server in servers], room=64, timeout=30.0, patience=2.0)
    yield made
    made.close()


class StubEngine:
    """The trainer's side of vLLM's NCCL engine in vLLM 0.32, call for call, with a list in the place of NCCL."""

    made: ClassVar[list["StubEngine"]] = []

    def __init__(self, address: str, port: int, size: int, client: Any, source: Any) -> None:
        self.client, self.source, self.size = client, source, size
        self.broadcast: list[tuple[str, torch.Tensor]] = []
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size, "packed": True}
        client.init_weight_transfer_engine(info)
        self.ended = threading.Event()
        self.model_update_group = SimpleNamespace(destroy=self.ended.set)
        StubEngine.made.append(self)

    def send_weights(self) -> None:
        meta = self.source.metadata()
        dtypes = [str(m.dtype).split(".")[-1] for m in meta]
        self.client.start_weight_update()
        names, shapes = [m.name for m in meta], [list(m.shape) for m in meta]
        self.client.update_weights({"names": names, "dtype_names": dtypes, "shapes": shapes})
        self.broadcast = list(self.source)
        for (name, tensor), m in zip(self.broadcast, meta, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == m, "vLLM refuses what was not announced"
        self.client.finish_weight_update()


CALLS = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]


def test_nccl_numbers_all_workers_and_sends_what_it_announced(servers, pool) -> None:
    StubEngine.made = []
    transfer = NcclTransfer(METADATA, connect=StubEngine)
    assert transfer.send(WEIGHTS.items(), pool, pool.servers) == pool.servers
    for number, server in enumerate(servers):
        assert [path for path, _ in server.posts] == CALLS
        info = server.posts[0][1]["init_info"]
        assert (info["rank_offset"], info["world_size"]) == (1 + number, 3)
        update = server.posts[2][1]["update_info"]
        assert update == {"names": ["embed", "norm"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2, 3], [2]]}
    for name, tensor in StubEngine.made[0].broadcast:
        torch.testing.assert_close(tensor, WEIGHTS[name].to(torch.bfloat16), rtol=0, atol=0)
    transfer.send(WEIGHTS.items(), pool, pool.servers)
    assert [path for path, _ in servers[0].posts] == CALLS + CALLS[1:], "the group is made once"


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_announced_is_what_the_policy_sends(servers, make_lm, tied: bool) -> None:
    lm = make_lm(tie_word_embeddings=tied, dtype=torch.float32)
    config = RolloutConfig(engine="vllm_server", vllm=VllmConfig(servers=[server.url for server in servers]))
    tokenizer = load_tokenizer(resolve_model("builtin:demo"), ModelConfig(path="none"))
    sampler = build_servers(lm, tokenizer, config, dtype=torch.bfloat16, barred=[])
    metadata = sampler.transfer._weights.metadata()  # type: ignore[attr-defined]
    sent = full_weights(build_policy(lm, ModelConfig(path="none", activation_checkpointing=True), temperature=1.0))
    assert [(name, torch.bfloat16, tuple(weight.shape)) for name, weight in sent] == metadata
    assert ("lm_head.weight" in [meta.name for meta in metadata]) is not tied
    sampler.close()


def test_other_servers_than_before_make_a_new_group(servers, pool) -> None:
    StubEngine.made = []
    transfer = NcclTransfer(METADATA, connect=StubEngine)
    transfer.send(WEIGHTS.items(), pool, pool.servers)
    servers[0].die()
    left = pool.well()
    assert [server.url for server in left] == [servers[1].url]
    assert transfer.send(WEIGHTS.items(), pool, left) == left
    assert [engine.size for engine in StubEngine.made] == [3, 2]
    assert [engine.ended.is_set() for engine in StubEngine.made] == [True, False]


def test_a_server_that_was_restarted_joins_a_new_group(servers, pool) -> None:
    StubEngine.made = []
    transfer = NcclTransfer(METADATA, connect=StubEngine)
    transfer.send(WEIGHTS.items(), pool, pool.servers)
    servers[0].die()
    assert pool.post(pool.servers[0], "/reset_prefix_cache") is None
    limit = time.monotonic() + 30
    while pool.servers[0].current and time.monotonic() < limit:
        time.sleep(0.02)
    with FakeServer(port=servers[0].port):
        assert transfer.send(WEIGHTS.items(), pool, pool.well(wait_for_all=True)) == pool.servers
    assert [engine.size for engine in StubEngine.made] == [3, 3]


def test_a_server_that_dies_in_the_middle_ends_the_hand_over(servers, pool, monkeypatch) -> None:
    """NCCL waits without end for a peer that is gone, on this side and in the other server, which does not answer."""

    class Dying(StubEngine):
        def send_weights(self) -> None:
            self.client.start_weight_update()
            servers[0].die()
            with ThreadPoolExecutor(1) as beside:
                received = beside.submit(self.client.update_weights, {})
                assert self.ended.wait(30), "the broadcast is ended"
                received.result()

    def post(handler: Any, send: Any = _Handler.do_POST) -> None:
        if handler.path == "/update_weights":
            servers[1].end.wait(60)
        send(handler)

    monkeypatch.setattr(_Handler, "do_POST", post)
    with pytest.raises(EngineLost, match=rf"{servers[0].url}/update_weights failed"):
        NcclTransfer(METADATA, connect=Dying).send(WEIGHTS.items(), pool, pool.servers)


def test_a_server_that_refuses_leaves_nothing_that_waits_for_the_others(servers, pool, monkeypatch) -> None:
    """Python joins the threads of executors before it ends, and would be held up by one that waits for minutes."""

    def post(handler: Any, send: Any = _Handler.do_POST) -> None:
        if handler.path == "/update_weights" and handler.fake is servers[1]:
            servers[1].end.wait(60)
        send(handler)

    def refuse(handler: Any, content: Any, status: int = 200, send: Any = _Handler._send) -> None:
        send(handler, content, 400 if handler.path == "/update_weights" else status)

    monkeypatch.setattr(_Handler, "do_POST", post)
    monkeypatch.setattr(_Handler, "_send", refuse)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=rf"{servers[0].url}/update_weights answered 400"):
        NcclTransfer(METADATA, connect=StubEngine).send(WEIGHTS.items(), pool, pool.servers)
    assert not [thread for thread in set(threading.enumerate()) - before if "ThreadPoolExecutor" in thread.name]


def test_what_nccl_raises_leaves_no_engine(servers, pool) -> None:
    class Broken(StubEngine):
        def send_weights(self) -> None:
            raise RuntimeError("NCCL error: remote process exited")

    with pytest.raises(EngineLost, match="broadcast of weights failed: NCCL error"):
        NcclTransfer(METADATA, connect=Broken).send(WEIGHTS.items(), pool, pool.servers)


def test_files_hold_the_weights_and_servers_are_told_where(servers, pool, tmp_path: Path) -> None:
    transfer = FolderTransfer(tmp_path, dtype=torch.bfloat16)
    folders = []
    (tmp_path / "new").touch()
    for scale in (1, 2):
        sent = {name: weight * scale for name, weight in WEIGHTS.items()}
        assert transfer.send(sent.items(), pool, pool.servers) == pool.servers
        path, call = servers[1].posts[-1]
        assert path == "/collective_rpc" and call["method"] == "take_folder"
        folders.append(call["args"][0])
        held = {name: t for file in Path(folders[-1]).glob("*.safetensors") for name, t in load_file(file).items()}
        assert held.keys() == sent.keys()
        modes = {file.stat().st_mode for file in (tmp_path / "new", *Path(folders[-1]).iterdir())}
        assert len(modes) == 1, "the server may be another user's"
        for name, weight in sent.items():
            torch.testing.assert_close(held[name], weight.to(torch.bfloat16), rtol=0, atol=0)
    assert folders[0] != folders[1], "a server may have the last ones mapped"


def test_a_server_that_does_not_take_the_files_is_left_out(servers, pool, tmp_path: Path) -> None:
    servers[0].die()
    taken = FolderTransfer(tmp_path, dtype=torch.float32).send(WEIGHTS.items(), pool, pool.servers)
    assert [server.url for server in taken] == [servers[1].url]
