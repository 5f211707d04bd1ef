"""Servers that fail in every way: no rollout lost or doubled, nothing hangs, and the log says what happened."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from fake_vllm import STOP, VOCABULARY, FakeServer, made_up
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fastrl_fast.config import RolloutConfig
from fastrl_fast.rollout import EngineLost, EngineSampler
from fastrl_fast.rollout.request import RequestMaker
from fastrl_fast.rollout.server_pool import ServerPool
from fastrl_fast.rollout.vllm_server import ServerSampler
from fastrl_fast.types import Group, Prompt

PROMPTS = [Prompt(f"p{i}", [2, 4 + i, 5], f"w{4 + i}", {}) for i in range(9)]
SIZES = [2, 4, 1, 3, 0, 5, 2, 2, 4]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": STOP} | {f"w{i}": i for i in range(4, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), eos_token="<eos>"
    )


class NoTransfer:
    def send(self, named, pool, servers):
        return [server for server in servers if pool.post(server, "/weights", {}) is not None]


@pytest.fixture
def make_sampler(process_group: object) -> Iterator[Callable[..., ServerSampler]]:
    """A sampler over fake servers, closed at the end."""
    made: list[ServerPool] = []

    def make(
        *servers: FakeServer, patience: float = 60.0, timeout: float = 30.0, room: int = 256, **settings: object
    ) -> ServerSampler:
        pool = ServerPool([server.url for server in servers], room=room, timeout=timeout, patience=patience)
        made.append(pool)
        config = RolloutConfig(**({"max_completion_tokens": 12} | settings))
        maker = RequestMaker(tokenizer(), config, stop_ids={STOP}, context=128)
        return ServerSampler(pool, maker, NoTransfer(), model="tiny")

    yield make
    for pool in made:
        pool.close()


def sample(sampler: ServerSampler, **settings: object) -> list[Group]:
    told: list[str] = []
    groups = sampler.sample(PROMPTS, SIZES, seed=7, step=3, finished=lambda g: told.append(g.prompt.id), **settings)
    assert sorted(told) == [prompt.id for prompt in PROMPTS], "each group is finished once"
    return groups


def check(groups: list[Group], sampler: ServerSampler) -> None:
    """Every completion is there once, in its place: the one that its prompt and seed make."""
    requests = sampler.maker.requests(PROMPTS, SIZES, seed=7, step=3)
    for group, request, size in zip(groups, requests, SIZES, strict=True):
        wanted = [made_up(request.prompt.token_ids, request.seed + i, 12) for i in range(size)]
        assert [rollout.completion_ids for rollout in group.rollouts] == wanted
        for rollout in group.rollouts:
            stopped = rollout.completion_ids[-1] == STOP
            assert rollout.finish_reason == ("stop" if stopped else "length")
            words = rollout.completion_ids[:-1] if stopped else rollout.completion_ids
            assert rollout.text == " ".join(f"w{i}" for i in words)
            assert rollout.rollout_logprobs == [-0.5] * len(rollout.completion_ids)


def test_groups_come_back_whole_and_in_order(make_sampler) -> None:
    with FakeServer() as one, FakeServer() as two:
        sampler = make_sampler(one, two)
        assert isinstance(sampler, EngineSampler)
        check(sample(sampler), sampler)
        bodies = one.asked() + two.asked()
        assert len(bodies) == 8 and one.asked() and two.asked(), "a prompt of no rollout is not asked"
        assert len({body["seed"] for body in bodies}) == 8
        assert all(body["stop_token_ids"] == [STOP] and body["return_token_ids"] for body in bodies)


def test_more_of_a_group_goes_on_where_the_first_call_ended(make_sampler) -> None:
    """AERO's rounds: completions i and those asked for later from i on are those of one larger request."""
    with FakeServer() as server:
        sampler = make_sampler(server)
        whole = sampler.sample(PROMPTS[:1], [5], seed=1, step=0)[0].rollouts
        first = sampler.sample(PROMPTS[:1], [2], seed=1, step=0)[0].rollouts
        rest = sampler.sample(PROMPTS[:1], [3], seed=1, step=0, first_index=2)[0].rollouts
        assert [r.completion_ids for r in whole] == [r.completion_ids for r in first + rest]
        other = sampler.sample(PROMPTS[:1], [5], seed=1, step=1)[0].rollouts
        assert [r.completion_ids for r in whole] != [r.completion_ids for r in other]


def test_the_likeliest_tokens_are_asked_for_once(make_sampler) -> None:
    """vLLM refuses n > 1 at temperature 0."""
    with FakeServer() as server:
        group = make_sampler(server).sample(PROMPTS[:1], [3], seed=0, step=0, temperature=0)[0]
        assert [body["n"] for body in server.asked()] == [1]
        assert len({tuple(r.completion_ids) for r in group.rollouts}) == 1 and len(group.rollouts) == 3


FAULTS = {
    "500": "answered 500",
    "half": "",
    "cut": "",
    "nonsense": "no JSON",
    "fewer": "whole completions",
    "null": "whole completions",
    "hang": "took too long",
    "trickle": "took too long",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_loses_and_doubles_nothing(make_sampler, caplog, fault: str) -> None:
    with FakeServer(faults=[fault, "none", fault]) as bad, FakeServer() as good:
        sampler = make_sampler(bad, good, timeout=1.0 if FAULTS[fault] == "took too long" else 30.0)
        started = time.monotonic()
        check(sample(sampler), sampler)
        assert time.monotonic() - started < 30
        lines = [record.getMessage() for record in caplog.records if bad.url in record.getMessage()]
        assert lines and FAULTS[fault] in lines[0]


@pytest.mark.parametrize("fault", ["500", "half", "hang"])
def test_one_server_that_recovers_is_enough(make_sampler, caplog, fault: str) -> None:
    with FakeServer(faults=[fault] * 3) as server:
        sampler = make_sampler(server, timeout=1.0 if fault == "hang" else 30.0)
        check(sample(sampler), sampler)
        assert any("is back" in record.getMessage() for record in caplog.records)


def test_a_server_that_was_never_there(make_sampler, caplog) -> None:
    gone = FakeServer()
    gone.die()
    with FakeServer() as good:
        sampler = make_sampler(gone, good)
        check(sample(sampler), sampler)
        assert any("refused the connection" in record.getMessage() for record in caplog.records)


def test_death_in_the_middle_of_a_batch(make_sampler, caplog) -> None:
    with FakeServer(dies_at=3, delay=0.02) as dying, FakeServer(delay=0.02) as good:
        sampler = make_sampler(dying, good)
        check(sample(sampler), sampler)
        answered = Counter(body["seed"] for body in dying.answered + good.answered)
        assert set(answered.values()) == {1} and len(answered) == 8
        lines = [record.getMessage() for record in caplog.records if dying.url in record.getMessage()]
        assert lines and "what it was asked goes to the others" in lines[0]


def test_a_slow_server_gets_less(make_sampler) -> None:
    with FakeServer(delay=0.3) as slow, FakeServer() as fast:
        sampler = make_sampler(slow, fast, room=4)
        check(sample(sampler), sampler)
        assert sum(body["n"] for body in slow.answered) < sum(body["n"] for body in fast.answered)


def test_all_gone_is_said_within_the_patience(make_sampler) -> None:
    with FakeServer(dies_at=2) as one, FakeServer(dies_at=2) as two:
        sampler = make_sampler(one, two, patience=1.0)
        started = time.monotonic()
        with pytest.raises(EngineLost, match=r"none of 2 vLLM servers answered for 1 s"):
            sample(sampler)
        assert time.monotonic() - started < 30


def test_servers_that_are_well_and_fail_whatever_they_are_asked_are_none(make_sampler) -> None:
    with FakeServer(always="500") as one:
        sampler = make_sampler(one, patience=1.0)
        with pytest.raises(EngineLost):
            sample(sampler)


def test_a_request_that_is_wrong_is_not_asked_again(make_sampler) -> None:
    with FakeServer(always="400") as one:
        sampler = make_sampler(one)
        with pytest.raises(ValueError, match=r"rollout\.vllm\.servers: .* answered 400: .*too long"):
            sample(sampler)


def test_a_server_that_was_restarted_waits_for_the_weights(make_sampler, caplog) -> None:
    """It would sample from the model of its start."""
    first, good = FakeServer(dies_at=1), FakeServer()
    sampler = make_sampler(first, good)
    check(sample(sampler), sampler)
    limit = time.monotonic() + 30
    while sampler.pool.servers[0].current and time.monotonic() < limit:
        time.sleep(0.05)
    with FakeServer(port=first.port) as again, good:
        while not sampler.pool.servers[0].well and time.monotonic() < limit:
            time.sleep(0.05)
        assert any("without the policy's weights" in record.getMessage() for record in caplog.records)
        check(sample(sampler), sampler)
        assert not again.asked()
        sampler.load_weights([])
        check(sample(sampler), sampler)
        assert again.asked() and again.asked("/reset_prefix_cache") and good.asked("/reset_prefix_cache")


def test_a_cache_of_the_old_weights_is_emptied_or_its_server_left_out(make_sampler, caplog, monkeypatch) -> None:
    with FakeServer() as one, FakeServer() as two:
        sampler = make_sampler(one, two)
        one.busy = 2
        sampler.load_weights([])
        assert len(one.asked("/reset_prefix_cache")) == 3 and all(s.serving for s in sampler.pool.servers)
        monkeypatch.setattr("fastrl_fast.rollout.vllm_server.FORGET_SECONDS", 0.0)
        two.busy = 10**6
        sampler.load_weights([])
        assert [server.serving for server in sampler.pool.servers] == [True, False]
        assert [two.url in record.getMessage() for record in caplog.records] == [True]
        check(sample(sampler), sampler)
        assert not two.asked()


def test_no_server_for_the_weights(make_sampler) -> None:
    server = FakeServer()
    sampler = make_sampler(server, patience=0.5)
    server.die()
    drained = iter([("a", None), ("b", None)])
    with pytest.raises(EngineLost):
        sampler.load_weights(drained)
    assert not list(drained), "other ranks gather each tensor with this one"


@pytest.mark.parametrize("error", [ValueError("answered 404"), OSError(28, "No space left"), EngineLost("of NCCL")])
def test_weights_that_rank_0_cannot_send_end_all_ranks(make_sampler, error: Exception) -> None:
    """And nobody takes the servers' logprobs for the policy's meanwhile."""

    class Failing:
        def send(self, named, pool, servers):
            raise error

    with FakeServer() as server:
        sampler = make_sampler(server)
        sampler.transfer = Failing()
        drained = iter([("a", None), ("b", None)])
        with pytest.raises((ValueError, EngineLost), match=r"answered 404|weights_folder: .*No space left|of NCCL"):
            sampler.load_weights(drained)
        assert not list(drained), "other ranks gather each tensor with this one"
        assert sampler.probe(PROMPTS) == [] and not server.posts


def test_probes_ask_each_server_for_the_whole_distribution(make_sampler) -> None:
    with FakeServer() as one, FakeServer() as two:
        sampler = make_sampler(one, two, top_p=0.9, top_k=5, max_completion_tokens=64)
        groups = sampler.probe(PROMPTS[:2])
        assert [group.prompt.id for group in groups] == ["p0", "p1"] * 2
        for server in (one, two):
            mode, *probes = server.asked()[:1] + [body for body in server.asked() if body["top_k"] != 1]
            assert mode["top_k"] == 1 and mode["max_tokens"] == 1
            assert all((b["top_p"], b["top_k"], b["max_tokens"]) == (1.0, 0, 16) for b in probes) and len(probes) == 2


def test_raw_logprobs_are_found_out(make_sampler, monkeypatch) -> None:
    monkeypatch.setattr("fake_vllm._Handler._answer", lambda self, body: {
        "choices": [{"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": [-1.25]}}]
    })  # fmt: skip
    with FakeServer() as one, pytest.raises(ValueError, match=r"--logprobs-mode processed_logprobs"):
        make_sampler(one).probe(PROMPTS[:1])


def test_leaving_early_calls_off_what_is_outstanding(make_sampler) -> None:
    """As Ctrl-C does in the middle of sampling."""
    with FakeServer(delay=0.3) as server:
        sampler = make_sampler(server)

        def stop(group: Group) -> None:
            if group.rollouts:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sampler.sample(PROMPTS, SIZES, seed=7, step=3, finished=stop)
        limit = time.monotonic() + 5
        while sampler.pool.servers[0].completions and time.monotonic() < limit:
            time.sleep(0.02)
        assert sampler.pool.servers[0].completions == 0


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_it_closes_while_servers_are_gone_and_being_looked_for(process_group: object) -> None:
    """A cancellation that comes together with a refused connection must not get lost."""
    for delay in (0.0, 0.01, 0.26, 0.27):
        server = FakeServer()
        pool = ServerPool([server.url], room=1, timeout=5.0, patience=0.0)
        server.die()
        with pytest.raises(EngineLost):
            pool.well()
        time.sleep(delay)
        pool.close()
