"""Rollouts one step ahead: the same as in turn but for the weights they are sampled from, which are one step old."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeServer
from test_collect import PROMPTS, Data, Grader, Sampler, config, texts

from fastrl_fast import schedule
from fastrl_fast.accuracy import build_grader
from fastrl_fast.budget import build_budget
from fastrl_fast.checkpoint import complete
from fastrl_fast.collect import Collected, Collector
from fastrl_fast.config import (
    BudgetConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.interrupt import Interrupt, Interrupted, Recall
from fastrl_fast.loss_config import ImportanceConfig
from fastrl_fast.metrics import Clock
from fastrl_fast.rollout_config import VllmConfig
from fastrl_fast.saved_rollouts import from_tensors, to_tensors
from fastrl_fast.schedule import InTurn, OneAhead, Schedule
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Trainer
from fastrl_fast.training_run import TrainingRun

WORKERS = Path(__file__).with_name("workers")
TIS = LossConfig(importance=ImportanceConfig(kind="token_truncate"))
STEPS = 4


class CursorData(Data):
    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]

    def first(self, count: int) -> list:
        return PROMPTS[:count]

    def __len__(self) -> int:
        return len(PROMPTS)


def make_schedule(settings: Config, *, ahead: bool, steps: int = 9, grader: object = None) -> Schedule:
    data, clock = CursorData(), Clock()
    collector = Collector(settings, data, Sampler(), grader or Grader(), build_budget(settings, prompts=5), clock)
    if not ahead:
        return InTurn(collector, data, Interrupt(), refresh=lambda: None)
    ready = {"recall": Recall(), "refresh": lambda: None, "clock": Clock(), "total_steps": steps}
    return OneAhead(collector, data, Interrupt(), **ready)


def step(made: Schedule, number: int, *, total: int = 9) -> Collected:
    """What a trainer does with a schedule in one step."""
    collected = made.take(number)
    made.collector.budget.observe(collected.outcomes(), step=number + 1, total_steps=total)
    made.before_update(number)
    made.after_update()
    return collected


BUDGETS = {
    "fixed": BudgetConfig(group_size=4),
    "ars": BudgetConfig(kind="ars", max_group_size=16, epoch_steps=2),
    "aero": BudgetConfig(kind="aero", group_size=2, max_group_size=10),
    "aero_ars": BudgetConfig(kind="aero_ars", group_size=2, max_group_size=10, epoch_steps=2),
    "knapsack": BudgetConfig(kind="knapsack", max_group_size=16),
    "greso": BudgetConfig(kind="greso", epoch_steps=2, tries=4),
    "dppo": BudgetConfig(kind="dppo", tries=4),
    "filter": BudgetConfig(group_size=4, filter=True, filter_on="right", tries=4),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_it_collects_what_it_would_in_turn(process_group, name: str) -> None:
    """With a sampler whose weights never change: prompts over epochs, sizes of budgets that learn, rounds, refills."""
    settings = config(budget=BUDGETS[name], prompts=3)
    in_turn, ahead = (make_schedule(settings, ahead=ahead) for ahead in (False, True))
    for number in range(9):
        ours, theirs = step(ahead, number), step(in_turn, number)
        assert texts(ours.groups) == texts(theirs.groups) and texts(ours.left_out) == texts(theirs.left_out)
        assert ours.counts.pop("rollout/staleness") == min(number, 1) and ours.counts.pop("rollout/seconds") > 0
        assert ours.counts == theirs.counts
    assert ahead.collector.data.position == in_turn.collector.data.position, "nothing was drawn for a tenth step"


@pytest.mark.parametrize("name", BUDGETS)
def test_rollouts_on_their_way_go_through_a_checkpoint(process_group, name: str) -> None:
    settings = config(budget=BUDGETS[name], prompts=3)
    whole, stopped, again = (make_schedule(settings, ahead=True) for _ in range(3))
    for number in range(2):
        step(whole, number)
        step(stopped, number)
    state, tensors = stopped.state()
    for part in ("data", "budget"):
        kept = json.loads(json.dumps(getattr(stopped.collector, part).state_dict()))
        getattr(again.collector, part).load_state_dict(kept)
    again.load_state(json.loads(json.dumps(state)), [tensors])
    for number in range(2, 9):
        ours, theirs = step(again, number), step(whole, number)
        for counts in (ours.counts, theirs.counts):
            assert counts.pop("rollout/seconds") > 0
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


def test_ranks_other_than_those_of_the_save_share_its_rollouts(process_group) -> None:
    made = make_schedule(config(budget=BUDGETS["filter"], prompts=3), ahead=False)
    parts = [step(made, number) for number in range(3)]
    parts[0].groups[0].rollouts[0].rewards, parts[0].groups[0].rollouts[0].reward = {"exact": None}, float("nan")
    back = from_tensors([to_tensors(part) for part in parts], {prompt.id: prompt for prompt in PROMPTS})
    assert repr(back.groups) == repr([group for part in parts for group in part.groups])
    assert repr(back.left_out) == repr([group for part in parts for group in part.left_out])
    assert from_tensors([], {}).groups == from_tensors([to_tensors(Collected())], {}).groups == []


class Broken(Grader):
    """Misbehaves once it is told to."""

    error: Exception | None = None

    def grade(self, *batch):
        if self.error is not None:
            raise self.error
        return super().grade(*batch)


def broken_in_the_second_step(error: Exception) -> Schedule:
    made = make_schedule(config(prompts=3), ahead=True, grader=Broken())
    made.take(0)
    made.collector.grader.error = error
    made.before_update(0)
    return made


@pytest.mark.parametrize("error", [ValueError("a reward is wrong"), RuntimeError("a defect")])
def test_what_goes_wrong_in_the_thread_ends_the_run_with_its_message(process_group, error: Exception) -> None:
    made = broken_in_the_second_step(error)
    with pytest.raises(type(error), match=str(error)):
        made.take(1)
    assert made.collector.data.position == 6, "as the step that goes wrong leaves it in turn"


def test_a_checkpoint_that_is_due_is_written_before_a_mistake_ends_the_run(process_group) -> None:
    """What all ranks know of waits for the step whose rollouts they are; what one met alone cannot."""
    made = broken_in_the_second_step(ValueError("a reward is wrong"))
    assert made.state() == (None, {}) and made.collector.data.position == 3
    made = broken_in_the_second_step(RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        made.state()


def test_settings_that_would_train_on_stale_rollouts_as_if_they_were_fresh_are_refused() -> None:
    servers = VllmConfig(servers=["http://a"])
    ahead = RolloutConfig(engine="vllm_server", vllm=servers, steps_ahead=1)
    parts = {"model": ModelConfig(path="m"), "data": DataConfig(path="d"), "rollout": ahead}
    with pytest.raises(ValueError) as refused:
        Config(**parts)
    assert str(refused.value) == (
        "loss.importance.kind must be other than none, or updates.old_logprobs rollout, where rollout.steps_ahead is "
        "1, got 'none'"
    )
    Config(**parts, loss=TIS)
    Config(**parts, updates=UpdatesConfig(old_logprobs="rollout"))
    for engine in ("local", "vllm"):
        with pytest.raises(ValueError, match=r"rollout.engine must be vllm_server where rollout.steps_ahead is 1"):
            RolloutConfig(engine=engine, steps_ahead=1)
    with pytest.raises(ValueError, match=r"rollout.steps_ahead must be 0 or 1, got 2"):
        RolloutConfig(engine="vllm_server", vllm=servers, steps_ahead=2)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(follows=True) as made:
        yield made


@pytest.fixture
def make_run(process_group, server: FakeServer, tmp_path: Path) -> Iterator[Callable[..., TrainingRun]]:
    """Runs of one folder with rollouts from the server."""
    files = {"weights": "folder", "weights_folder": str(tmp_path / "weights")}
    settings = Config(
        model=ModelConfig(path="builtin:demo"),
        data=DataConfig(path="demo:train?size=64", prompts_per_step=4),
        rollout=RolloutConfig(
            engine="vllm_server",
            steps_ahead=1,
            max_completion_tokens=8,
            vllm=VllmConfig(servers=[server.url], parity="warn", patience=2.0, **files),
        ),
        reward=RewardConfig(functions={f"{WORKERS / 'length_reward.py'}:length": 1.0}, workers=1),
        budget=BudgetConfig(group_size=4),
        loss=TIS,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    parts = []

    def make(ahead: int = 1, **changes: object) -> TrainingRun:
        own = dataclasses.replace(settings, rollout=dataclasses.replace(settings.rollout, steps_ahead=ahead), **changes)
        parts.append(build_parts(own, load_inputs(own, grader), grader, process_group, folder=tmp_path, log=None))
        return TrainingRun(Trainer(own, parts[-1], total_steps=STEPS))

    with build_grader(settings.reward) as grader:
        yield make
        for part in parts:
            part.sampler.close()


def test_each_step_trains_on_rollouts_of_the_policy_one_step_ago(make_run, server: FakeServer, monkeypatch) -> None:
    """The next ones are sampled while the policy is updated: the server answers nothing before the update begins."""
    run = make_run(eval=EvalConfig(path="demo:heldout?size=4", every=3))
    steps, log, never = [], [], threading.Event()
    update, prune = Trainer.update, Trainer.prune

    def watched_prune(trainer: Trainer, groups: list) -> None:
        steps.append([group.prompt.token_ids for group in groups])
        if trainer.steps_done + 1 < STEPS:
            server.gate.clear()
        prune(trainer, groups)

    def watched_update(trainer: Trainer, updates: list) -> object:
        asked = len(server.answered)
        if trainer.steps_done == 2:  # an evaluation comes, which has to wait for them
            threading.Timer(0.5, server.gate.set).start()
            return update(trainer, updates)
        server.gate.set()
        if trainer.steps_done + 1 < STEPS:
            while len(server.answered) < asked + 4:
                assert not never.wait(0.01)
        return update(trainer, updates)

    monkeypatch.setattr(Trainer, "prune", watched_prune)
    monkeypatch.setattr(Trainer, "update", watched_update)
    monkeypatch.setattr(run, "_log", log.append)
    run.run()
    assert [m["rollout/staleness"] for m in log] == [0.0, 1.0, 1.0, 1.0]
    assert ["eval/avg@1" in m for m in log] == [False, False, True, True]
    # Which weights a prompt of each step was sampled from: those handed over so many times before.
    handed, sampled, evaluated = 0, {}, []
    for path, body in server.posts:
        handed += path == "/collective_rpc"
        if path == "/v1/completions" and body["n"] == 4:
            sampled[tuple(body["prompt"])] = handed
        elif path == "/v1/completions" and body["max_tokens"] == 8 and body["top_k"] == 0:
            evaluated.append(handed)
    assert [{sampled[tuple(prompt)] for prompt in step} for step in steps] == [{1}, {1}, {2}, {3}]
    assert len(sampled) == 4 * STEPS, "none are sampled for a step that does not come"
    assert server.at_gate_when_handed == [0] * 5, "no weights while anything is on its way"
    assert handed == 5, "before the first step, three times before an update, and before the last evaluation"


def test_a_run_that_is_stopped_waits_for_rollouts_but_not_for_long(make_run, server: FakeServer, monkeypatch) -> None:
    """It forgets them then, and is as if their step had not begun; what the server still owes is called off."""
    monkeypatch.setattr(schedule, "SECONDS_TO_ARRIVE", 0.3)
    run = make_run()
    update = Trainer.update

    def stopped_update(trainer: Trainer, updates: list) -> object:
        if trainer.steps_done == 1:
            server.gate.clear()
            signal.raise_signal(signal.SIGTERM)
        return update(trainer, updates)

    before_update = run.trainer.schedule.before_update

    def held(step: int) -> None:
        if step == 1:
            server.gate.clear()
        before_update(step)

    monkeypatch.setattr(Trainer, "update", stopped_update)
    monkeypatch.setattr(run.trainer.schedule, "before_update", held)
    with pytest.raises(Interrupted, match="SIGTERM"):
        run.run()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    server.gate.set()
    monkeypatch.setattr(Trainer, "update", update)
    again, log = make_run(), []
    monkeypatch.setattr(again, "_log", log.append)
    assert_goes_on_after_two_steps(again)
    again.run()
    assert [m["rollout/staleness"] for m in log] == [0.0, 1.0]


def saved(run: TrainingRun) -> list[str]:
    run.parts.checkpointer.wait()
    return [folder.name for folder in complete(run.parts.checkpointer.folder)]


def assert_goes_on_after_two_steps(again: TrainingRun) -> None:
    """Without rollouts of the third: what was there of them was cut short."""
    assert again.resume() and again.trainer.steps_done == 2
    assert again.trainer.schedule.state() == (None, {}) and again.parts.data.state_dict()["position"] == 2 * 4


def test_what_servers_refuse_is_said_after_the_step_is_saved(make_run, server: FakeServer) -> None:
    run = make_run(checkpoint=CheckpointConfig(every=1))
    server.refuses = make_run().parts.data.next_prompts(12)[11].token_ids
    with pytest.raises(ValueError, match=f"{server.url}/v1/completions answered 400"):
        run.run()
    assert saved(run)[-1] == "step_000002"
    assert_goes_on_after_two_steps(make_run())


@pytest.mark.parametrize("ahead", [0, 1])
def test_rollouts_with_a_logprob_that_is_no_number_are_skipped(make_run, server, monkeypatch, ahead: int) -> None:
    """As in turn so one step ahead, where they go through a checkpoint before their update."""
    run, log = make_run(ahead=ahead, checkpoint=CheckpointConfig(every=1)), []
    sample = run.trainer.schedule.collector.collect

    def collect(step: int) -> Collected:
        server.logprob = math.nan if step == 2 else -0.5
        return sample(step)

    monkeypatch.setattr(run.trainer.schedule.collector, "collect", collect)
    monkeypatch.setattr(run, "_log", log.append)
    run.run()
    assert [m["optimizer/not_finite"] for m in log] == [0, 0, 1, 0]
    assert saved(run)[-1] == "step_000004"


def test_servers_that_end_while_they_sample_end_the_run_with_what_was_done(make_run, server, monkeypatch) -> None:
    """An evaluation that is due then does not wait for servers once more."""
    run = make_run(eval=EvalConfig(path="demo:heldout?size=4", every=1))
    before_update, handed, sync = run.trainer.schedule.before_update, [], Trainer.sync_sampler

    def dying(step: int) -> None:
        if step == 1:
            server.dies_at = len(server.asked()) + 2  # after one prompt
        before_update(step)

    def counted(trainer: Trainer) -> None:
        handed.append(trainer.steps_done)
        sync(trainer)

    monkeypatch.setattr(Trainer, "sync_sampler", counted)
    monkeypatch.setattr(run.trainer.schedule, "before_update", dying)
    with pytest.raises(Interrupted, match="none of 1 vLLM servers answered"):
        run.run()
    assert saved(run) == ["step_000002"] and handed == [0, 1], "no weights for an engine that is lost"
    with FakeServer(port=server.port):
        assert_goes_on_after_two_steps(make_run())


def test_ranks_stop_resume_and_fail_together(tmp_path: Path) -> None:
    """Two ranks: a run that one of them stops goes on to the weights of one that was not stopped, bit for bit; a defect
    in the thread of one ends both, with its message."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with FakeServer(follows=True) as one, FakeServer(follows=True) as two:
        done = subprocess.run(
            [*launch, WORKERS / "steps_ahead.py", tmp_path, one.url, two.url],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "RuntimeError: broken on purpose" in said, said[-5000:]
    whole, stopped = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "stopped"))
    assert stopped["restored"] and stopped["staleness"] == whole["staleness"] == [0.0, 1.0, 1.0, 1.0]
    assert stopped["rollouts"] == whole["rollouts"] and len(whole["rollouts"]) == 4
    assert all(torch.equal(stopped["weights"][name], weight) for name, weight in whole["weights"].items())
    moved = sum(float((weight - whole["start"][name]).abs().sum()) for name, weight in whole["weights"].items())
    assert moved > 0
