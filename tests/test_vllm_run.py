"""Whole runs whose rollouts come from (fake) servers: over two nodes, and to a clean end when all servers are gone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeServer
from test_vllm_transfer import StubEngine

from fastrl_fast import cli, evaluate
from fastrl_fast.builtin import resolve_model
from fastrl_fast.checkpoint import Checkpointer, complete
from fastrl_fast.data import PromptData
from fastrl_fast.model import build_policy, full_weights, load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[1]
SMALL = ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=8"]
SMALL += ["--eval.prompts=4", "--reward.workers=1", "--max_steps=3", "--checkpoint.every=100", "--prune.method=none"]


def command(folder: Path, servers: list[FakeServer], *more: str) -> list[str]:
    """A made-up server is of another policy: the guard may only warn."""
    vllm = [f"--rollout.vllm.servers=[{','.join(server.url for server in servers)}]", "--rollout.vllm.parity=warn"]
    vllm += ["--rollout.vllm.weights=folder", f"--rollout.vllm.weights_folder={folder / 'weights'}"]
    vllm += ["--rollout.engine=vllm_server", "--rollout.vllm.patience=3", f"--run_dir={folder / 'run'}"]
    return ["-m", "fastrl_fast.train", *SMALL, *vllm, *more]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join(sys.path)}


def steps(folder: Path) -> list[dict]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_all_servers_gone_ends_with_a_checkpoint_and_code_3(tmp_path: Path) -> None:
    """And with servers at the same places again the same command goes on to the end."""
    servers = [FakeServer(delay=0.1), FakeServer(delay=0.1)]
    arguments = [sys.executable, *command(tmp_path, servers, "--max_steps=6")]
    pipes = dict(env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = subprocess.Popen(arguments, **pipes)
    limit = time.monotonic() + 400
    while len(steps(tmp_path)) < 2 and run.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    for server in servers:
        server.die()
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 3, out
    done = len(steps(tmp_path))
    said = " ".join(out.split())
    assert "ALARM: the engine's logprobs differ from the policy's" in said
    assert f"ended by none of 2 vLLM servers answered for 3 s after step {done}" in said
    assert [path.name for path in complete(tmp_path / "run" / "checkpoints")] == [f"step_{done:06}"]
    with FakeServer(port=servers[0].port), FakeServer(port=servers[1].port):
        again = subprocess.run(arguments, timeout=300, **pipes)
    assert again.returncode == 0, again.stdout
    assert [m["step"] for m in steps(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_hands_the_weights_over_first(tmp_path: Path, monkeypatch, capsys) -> None:
    """A server may have those of another run; one that is gone is one line and code 3."""
    with FakeServer() as server:
        monkeypatch.setattr(sys, "argv", ["evaluate", *command(tmp_path, [server])[2:-1], "--rollout.vllm.patience=1"])
        assert evaluate.main() == 0
        paths = [path for path, _ in server.posts]
        assert paths == ["/collective_rpc", "/reset_prefix_cache", *["/v1/completions"] * 4]
        assert 0.0 <= json.loads(capsys.readouterr().out)["avg@1"] <= 1.0
    with FakeServer(dies_at=2) as server:
        servers = f"--rollout.vllm.servers=[{server.url}]"
        monkeypatch.setattr(sys, "argv", [*sys.argv, servers])
        assert evaluate.main() == 3
        assert capsys.readouterr().err == "error: none of 1 vLLM servers answered for 1 s\n"


def test_the_weights_of_a_run_go_in_the_order_that_servers_are_told_of(
    process_group: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's files have another order, and vLLM refuses what was not announced."""
    monkeypatch.setattr("fastrl_fast.rollout.weight_transfer._connect", StubEngine)
    with FakeServer() as server:
        servers = [f"--rollout.vllm.servers=[{server.url}]", "--rollout.engine=vllm_server"]
        config, _ = cli.parse([*SMALL, *servers], prog="evaluate")
        lm = load_causal_lm(resolve_model(config.model.path), config.model)
        policy = build_policy(lm, config.model, temperature=1.0)
        saver = Checkpointer(tmp_path / "checkpoints", keep=1)
        saver.save(1, policy, torch.optim.AdamW(policy.parameters()), {})
        saver.wait()
        StubEngine.made = []
        assert "avg@1" in evaluate.evaluate(config, tmp_path, process_group)
    sent = StubEngine.made[0].broadcast
    for (name, ours), (theirs, weight) in zip(sent, full_weights(policy), strict=True):
        assert name == theirs and torch.equal(ours, weight.to(ours.dtype))


@pytest.mark.slow
def test_a_request_that_is_wrong_ends_all_ranks_with_its_message(tmp_path: Path) -> None:
    """It is one of rank 1's; the message is for rank 0 to say."""
    with FakeServer() as server:
        arguments = command(tmp_path, [server])
        config, _ = cli.parse(arguments[2:], prog="train")
        tokenizer = load_tokenizer(resolve_model(config.model.path), config.model)
        server.refuses = PromptData(config.data, tokenizer, seed=config.seed).next_prompts(4)[3].token_ids
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
        done = subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=300)
        answered = [body["n"] for body in server.answered]
    assert done.returncode == 1
    assert f"error: rollout.vllm.servers: {server.url}/v1/completions answered 400: " in done.stderr, done.stderr
    assert "exitcode  : 2" in done.stderr and not steps(tmp_path)
    assert answered.count(1) == 3 + 4 and answered.count(4) <= 3, "which logprobs, two probes, held-out prompts; a step"


@pytest.mark.slow
def test_two_nodes_share_the_servers(tmp_path: Path) -> None:
    """torchrun on two nodes, here two launchers on ports of one machine; every rollout is sampled once, somewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    with FakeServer() as one, FakeServer() as two:
        nodes = [
            subprocess.Popen(
                [*launch, f"--node-rank={rank}", *command(tmp_path, [one, two], "--max_steps=2")],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outs = [node.communicate(timeout=500)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(outs)
        assert [m["rollouts/generated"] for m in steps(tmp_path)] == [16.0, 16.0]
        for server in (one, two):
            taken = [path for path, _ in server.posts if path in ("/collective_rpc", "/reset_prefix_cache")]
            assert taken == ["/collective_rpc", "/reset_prefix_cache"] * 3, (
                "from rank 0 alone, at the start and per step"
            )
        train = [body["seed"] for body in one.answered + two.answered if body["n"] == 4]
        assert len(train) == len(set(train)) == 2 * 4
