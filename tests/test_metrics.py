"""Numbers of a run: where they are written, how they survive a kill, and that they are the right ones."""

import json
import math
import sys
import time

import pytest
import torch

from fastrl_fast import step_report
from fastrl_fast.config import RewardTerm
from fastrl_fast.metrics import PHASES, Clock, RunLog, check_trackers, phase, step_line
from fastrl_fast.prune import DROP_REASONS, FREE, SIMILAR, UNGRADED
from fastrl_fast.types import Group, Prompt, Rollout

TERMS = [RewardTerm(name="exact", weight=1.0), RewardTerm(name="format", weight=0.5)]
METRICS = {
    "reward/mean": 0.1234,
    "rollouts/kept_fraction": 0.5,
    "groups/dead": 3.0,
    "groups/count": 16.0,
    "tokens/generated": 1000.0,
    "tokens/trained": 400.0,
    "seconds/step": 1.5,
    "seconds/sample": 1.25,
    "seconds/update": 0.2,
    "seconds/pack": 0.001,
}


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr("fastrl_fast.metrics._with_tensorboard", lambda trackers: trackers)
    made = RunLog(tmp_path, total_steps=10, trackers=[], settings={})
    yield made
    made.close()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_the_line_of_a_step():
    assert step_line(7, METRICS) == (
        "step    7  reward 0.123  kept  50%  dead 3/16  tokens 1000 -> 400  1.50 s (sample 1.25 update 0.20)"
    )
    assert "dead 3/16  ungraded 12  tokens" in step_line(7, METRICS | {"dropped/ungraded": 12.0})
    after = step_line(7, METRICS | {"eval/avg@4": 0.25, "eval/pass@4": 0.75, "eval/ungraded": 1.0})
    assert after.endswith("(sample 1.25 update 0.20)  avg@4 0.250  pass@4 0.750")


def test_steps_are_written_and_shown(log, tmp_path, capsys):
    log.step(1, METRICS)
    log.step(2, METRICS | {"policy/ratio": math.nan, "loss/value": -math.inf})
    written = lines(tmp_path / "metrics.jsonl")
    assert written[0] == {"step": 1, **METRICS}
    assert written[1] == {"step": 2, **METRICS, "policy/ratio": None, "loss/value": None}, "JSON has no NaN"
    assert "step    2  reward 0.123" in capsys.readouterr().out


def test_markup_in_what_is_said_is_printed_as_it_is(log, capsys):
    log.say("runs/[bold]x[/bold] of " + "y" * 300)
    assert capsys.readouterr().out == "runs/[bold]x[/bold] of " + "y" * 300 + "\n"


ODD = [
    "plain",
    "line\u2028separator",
    "next\u0085line",
    "form\x0cfeed",
    "re\rturn",
    "漢字 🎉",
    "lone \ud800 surrogate",
    '"\\\n',
]


def test_resuming_forgets_later_steps_and_a_torn_line(log, tmp_path):
    for step, text in enumerate(ODD, start=1):
        log.rollouts([{"step": step, "completion": text}, {"step": step, "completion": text * 2}])
        log.step(step, METRICS)
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write('{"step": 3, "completion": "torn inside a character 漢'.encode()[:-1])
    log.resume_at(7)
    kept = lines(tmp_path / "rollouts.jsonl")
    assert kept == [{"step": i + 1, "completion": t * n} for i, t in enumerate(ODD[:7]) for n in (1, 2)]
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    log.resume_at(0)
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "rollouts.jsonl"]


def test_resuming_a_new_run_makes_no_files(log, tmp_path):
    log.resume_at(0)
    assert not any(tmp_path.iterdir())


def test_clock_adds_repeated_phases_and_forgets_on_take(monkeypatch):
    now = iter([0.0, 1.0, 10.0, 12.0, 20.0, 30.0, 34.0, 40.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    started: list[str] = []
    clock = Clock(on_phase=started.append)
    for _ in range(2):
        with clock.measure("sample"):
            pass
    with clock.measure("update"), clock.measure("score"):
        pass
    assert clock.take() == {"sample": 3.0, "update": 20.0, "score": 4.0}, "an inner phase is in the outer one too"
    assert clock.take() == {}
    assert started == ["sample", "sample", "update", "score"]


def test_phase_times_a_method_and_keeps_its_answer():
    class Owner:
        def __init__(self) -> None:
            self.clock = Clock()

        @phase("grade")
        def grade(self, a: int, *, b: int) -> int:
            """What it does."""
            return a + b

        @phase("save")
        def save(self) -> None:
            raise OSError("disk full")

    owner = Owner()
    assert owner.grade(1, b=2) == 3 and set(owner.clock.seconds) == {"grade"}
    assert Owner.grade.__name__ == "grade" and Owner.grade.__doc__ == "What it does."
    with pytest.raises(OSError, match="disk full"):
        owner.save()
    with pytest.raises(AssertionError, match="not one of"):
        phase("sing")
    assert "grade" in PHASES


FAKE = """
calls = []

class Run:
    def log(self, metrics, step):
        if step == 3:
            raise RuntimeError("no network")
        calls.append(("log", step, dict(metrics)))

    def finish(self):
        calls.append(("finish",))

def init(**settings):
    calls.append(("init", settings))
    return Run()
"""


@pytest.fixture
def fake_trackio(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield
    sys.modules.pop("trackio", None)


def test_trackers_get_settings_and_metrics(fake_trackio, tmp_path, monkeypatch, capsys):
    """X05: one that fails in the middle is left out with one warning, and the run goes on."""
    monkeypatch.setattr("fastrl_fast.metrics._with_tensorboard", lambda trackers: trackers)
    check_trackers(["trackio"])
    log = RunLog(tmp_path / "demo-1234", total_steps=4, trackers=["trackio"], settings={"seed": 3})
    (tmp_path / "demo-1234").mkdir()
    for step in (1, 2, 3, 4):
        log.step(step, METRICS)
    log.close()
    calls = sys.modules["trackio"].calls
    assert calls[0] == ("init", {"project": "fastrl_fast", "name": "demo-1234", "config": {"seed": 3}})
    assert calls[1:] == [("log", 1, METRICS), ("log", 2, METRICS)]
    assert len(lines(tmp_path / "demo-1234" / "metrics.jsonl")) == 4
    assert capsys.readouterr().out.count("log.trackers: trackio failed and gets no more metrics: no network") == 1


def test_a_tracker_that_works_is_closed(fake_trackio, tmp_path, monkeypatch):
    monkeypatch.setattr("fastrl_fast.metrics._with_tensorboard", lambda trackers: trackers)
    RunLog(tmp_path, total_steps=4, trackers=["trackio"], settings={}).close()
    assert sys.modules["trackio"].calls[-1] == ("finish",)


def test_a_tracker_that_is_not_installed_is_one_clear_line(tmp_path, monkeypatch):
    """Also where a folder of its name lies about, as wandb leaves one behind."""
    for name in ("wandb", "trackio"):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"^log\.trackers: {name} is not installed; pip install {name}$"):
            check_trackers([name])


@pytest.mark.slow
def test_tensorboard_is_on_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    log = RunLog(tmp_path, total_steps=2, trackers=[], settings={})
    log.step(1, METRICS)
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


def rollout(tokens: int, rewards: tuple, reward: float, drop_reason: str = "", finish: str = "stop") -> Rollout:
    made = Rollout(list(range(tokens)), [-1.0] * tokens, finish, text="t" * tokens)
    made.rewards = dict(zip(("exact", "format"), rewards, strict=True))
    made.reward, made.drop_reason = reward, drop_reason
    return made


@pytest.fixture
def groups() -> list[Group]:
    return [
        Group(
            Prompt("a", [1, 2, 3], "ask", {"answer": "42"}),
            [
                rollout(4, (1.0, 1.0), 1.5),
                rollout(2, (0.0, 1.0), 0.5, SIMILAR),
                rollout(3, (None, 0.0), math.nan, UNGRADED, "length"),
            ],
        ),
        Group(
            Prompt("b", [1], [{"role": "user", "content": "ask"}], {}),
            [rollout(5, (0.0, 0.0), 0.0, FREE)] * 2,
            dead=True,
        ),
    ]


def test_step_metrics_by_hand(groups, process_group):
    sums = step_report.rollout_sums(groups, TERMS)
    updates = {name: torch.tensor(2.0 * i) for i, name in enumerate(("loss", "update_tokens", "entropy", "ratio"))}
    metrics = step_report.step_metrics(step_report.add_up(sums, updates), TERMS)
    expected = {
        "reward/mean": (1.5 + 0.5 + 0 + 0) / 4,
        "reward/std": math.sqrt((1.0**2 + 0.0 + 0.5**2 + 0.5**2) / 4),
        "reward/exact": (1 + 0 + 0 + 0) / 4,
        "reward/format": (1 + 1 + 0 + 0 + 0) / 5,
        "groups/count": 2,
        "groups/dead": 1,
        "groups/effective_size": 1,
        "prune/fidelity": 1,
        "rollouts/generated": 5,
        "rollouts/graded": 4,
        "rollouts/kept": 1,
        "rollouts/kept_fraction": 1 / 5,
        **{
            f"{what}/{reason.replace(' ', '_')}": 0 for what in ("dropped", "dropped_tokens") for reason in DROP_REASONS
        },
        "dropped/ungraded": 1,
        "dropped/similar": 1,
        "dropped/zero_advantage": 2,
        "dropped_tokens/ungraded": 3,
        "dropped_tokens/similar": 2,
        "dropped_tokens/zero_advantage": 10,
        "tokens/prompt": 4,
        "tokens/generated": 19,
        "tokens/graded": 16,
        "tokens/trained": 4,
        "completion/length": 19 / 5,
        "completion/truncated_fraction": 1 / 5,
        "loss/value": 0.0,
        "policy/entropy": 4 / 2,
        "policy/ratio": 6 / 2,
    }
    assert metrics == pytest.approx(expected)


def test_names_do_not_depend_on_what_a_rank_holds(groups):
    """P09: the sums are added over ranks position by position."""
    assert list(step_report.rollout_sums([], TERMS)) == list(step_report.rollout_sums(groups, TERMS))


def test_nothing_graded_and_nothing_trained_is_no_division_by_zero(process_group):
    """P02, L08."""
    sums = step_report.rollout_sums([], TERMS)
    updates = {"loss": torch.tensor(0.0), "update_tokens": torch.tensor(0.0), "kl": torch.tensor(0.0)}
    metrics = step_report.step_metrics(step_report.add_up(sums, updates), TERMS)
    assert all(value == 0.0 for value in metrics.values())
    for mean in ("policy/kl", "prune/fidelity", "groups/effective_size"):
        assert mean not in metrics, "a mean over nothing is no number, least of all 0"


def test_ranks_add_up(groups, process_group, monkeypatch):
    """Two ranks with the same groups: counts double, means stay."""
    monkeypatch.setattr("fastrl_fast.distributed.all_sum", lambda values: values * 2)
    updates = {"loss": torch.tensor(1.5), "update_tokens": torch.tensor(4.0), "entropy": torch.tensor(2.0)}
    twice = step_report.step_metrics(step_report.add_up(step_report.rollout_sums(groups, TERMS), updates), TERMS)
    assert (twice["reward/mean"], twice["rollouts/generated"], twice["policy/entropy"]) == (0.5, 10, 0.5)
    assert twice["loss/value"] == 3.0, "parts of the loss add up to it"


def test_records_tell_the_fate_of_every_rollout(groups):
    records = step_report.rollout_records(groups, step=3)
    assert [r["prompt_id"] for r in records] == ["a", "a", "a", "b", "b"]
    assert [r["kept"] for r in records] == [True, False, False, False, False]
    assert [r["drop_reason"] for r in records] == ["", SIMILAR, UNGRADED, FREE, FREE]
    assert records[2] == {
        "step": 3,
        "prompt_id": "a",
        "prompt": "ask",
        "answer": "42",
        "completion": "ttt",
        "tokens": 3,
        "finish_reason": "length",
        "rewards": {"exact": None, "format": 0.0},
        "reward": None,
        "advantage": 0.0,
        "weight": 1.0,
        "kept": False,
        "drop_reason": UNGRADED,
    }
    json.dumps(records, allow_nan=False)
