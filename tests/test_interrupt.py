"""Signals and crashes: nothing hangs, nothing is lost, nobody is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastrl_fast.checkpoint import choose, complete, load_weights
from fastrl_fast.interrupt import Interrupt, Interrupted, InterruptibleSampler
from fastrl_fast.types import Group, Prompt

ROOT = Path(__file__).parents[1]
LENGTH = ROOT / "tests" / "workers" / "length_reward.py"
SMALL = ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=16"]
SMALL += ["--eval.prompts=4", "--reward.workers=1", "--max_steps=5", "--checkpoint.every=100"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PROMPT_END = 30.0
"""Seconds in which everything must be gone."""

SLOW_REWARD = """
import pathlib, time
def slow(prompts, completions, **columns):
    if pathlib.Path(__file__).with_name("wait").exists():
        pathlib.Path(__file__).with_name("waiting").touch()
        time.sleep(600)
    return [float(len(c) % 3) for c in completions]
"""


class Run:
    """A command in a session of its own; whatever it starts inherits a mark by which it is found."""

    def __init__(self, *command: object, log: Path) -> None:
        self.mark = uuid.uuid4().hex
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        env |= {"FASTRL_TEST_MARK": self.mark}
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                # A shell that makes its jobs ignore Ctrl-C hands that down.
                ["env", "--default-signal=INT", *map(str, command)],
                env=env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait_for(self, path: Path, lines: int = 0) -> None:
        limit = time.monotonic() + 150
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            assert self.process.poll() is None, f"it ended early: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < limit, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def end(self, seconds: float = 170) -> int:
        """Its exit code; fails where anything it started is still there."""
        try:
            code = self.process.wait(seconds)
            limit = time.monotonic() + 5
            while (left := self.living()) and time.monotonic() < limit:
                time.sleep(0.05)
            assert not left, f"left behind: {left}"
            return code
        finally:
            for pid in self.living():
                os.kill(pid, signal.SIGKILL)

    def living(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if alive and self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


def train(*arguments: object) -> list[object]:
    return ["-m", "fastrl_fast.train", *SMALL, f"--reward.functions={{{LENGTH}:length: 1.0}}", *arguments]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """Folders of a run of two ranks that went through, and of one that SIGTERM ended, copied before it was resumed."""
    root = tmp_path_factory.mktemp("ranks")
    whole = Run(*LAUNCH, *train(f"--run_dir={root / 'whole'}"), log=root / "whole.log")
    assert whole.end() == 0, (root / "whole.log").read_text()[-3000:]
    ended = Run(*LAUNCH, *train(f"--run_dir={root / 'ended'}"), log=root / "ended.log")
    ended.wait_for(root / "ended" / "metrics.jsonl", 2)
    started = time.monotonic()
    ended.process.send_signal(signal.SIGTERM)
    assert ended.end() != 0
    assert time.monotonic() - started < PROMPT_END
    yield root / "whole", root / "ended", (root / "ended.log").read_text()


@pytest.mark.slow
def test_x03_sigterm_saves_on_all_ranks_and_the_run_goes_on_bit_equal(two_ranks, tmp_path: Path) -> None:
    whole, ended, said = two_ranks
    done = len(records(ended))
    assert [path.name for path in complete(ended / "checkpoints")] == [f"step_{done:06d}"] and 2 <= done < 5
    assert f"ended by SIGTERM after step {done}; the same command goes on" in said
    folder = tmp_path / "ended"
    shutil.copytree(ended, folder)
    again = Run(*LAUNCH, *train(f"--run_dir={folder}"), log=tmp_path / "log")
    assert again.end() == 0, (tmp_path / "log").read_text()[-3000:]
    ours, theirs = load_weights(choose(folder / "checkpoints")), load_weights(choose(whole / "checkpoints"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(record["optimizer/updates"] for record in records(whole)), "there must be something to compare"
    same = ("step", "reward/mean", "loss/value", "rollouts/kept", "eval/avg@1", "optimizer/grad_norm")
    pairs = zip(records(folder), records(whole), strict=True)
    assert all({k: a.get(k) for k in same} == {k: b.get(k) for k in same} for a, b in pairs)


@pytest.mark.slow
def test_c08_a_run_goes_on_with_fewer_ranks(two_ranks, tmp_path: Path) -> None:
    whole, ended, _ = two_ranks
    folder = tmp_path / "ended"
    shutil.copytree(ended, folder)
    again = Run(sys.executable, *train(f"--run_dir={folder}"), log=tmp_path / "log")
    assert again.end() == 0, (tmp_path / "log").read_text()[-3000:]
    assert [r["step"] for r in records(folder)] == [1, 2, 3, 4, 5]
    assert records(folder)[-1]["reward/mean"] == pytest.approx(records(whole)[-1]["reward/mean"], abs=0.2)


@pytest.mark.slow
def test_ctrl_c_in_a_long_step_ends_it_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """The step that is cut short is taken again, from its beginning."""
    (tmp_path / "r.py").write_text(SLOW_REWARD)
    reward = [f"--reward.functions={{{tmp_path / 'r.py'}:slow: 1.0}}", "--reward.timeout=300", "--eval.path=null"]
    whole = Run(sys.executable, *train(*reward, f"--run_dir={tmp_path / 'whole'}"), log=tmp_path / "whole.log")
    assert whole.end() == 0, (tmp_path / "whole.log").read_text()[-3000:]
    command = [sys.executable, *train(*reward, f"--run_dir={tmp_path / 'run'}")]
    run = Run(*command, log=tmp_path / "log")
    run.wait_for(tmp_path / "run" / "metrics.jsonl", 2)
    (tmp_path / "wait").touch()
    run.wait_for(tmp_path / "waiting")
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, (tmp_path / "log").read_text()[-3000:]
    assert time.monotonic() - started < PROMPT_END
    assert "SIGINT: saving, then ending" in (tmp_path / "log").read_text()
    (tmp_path / "wait").unlink()
    again = Run(*command, log=tmp_path / "log")
    assert again.end() == 0, (tmp_path / "log").read_text()[-3000:]
    ours, theirs = (
        load_weights(choose(tmp_path / "run" / "checkpoints")),
        load_weights(choose(tmp_path / "whole" / "checkpoints")),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()) == 5 * 16


BLOCKED = """
import signal, sys, threading
from fastrl_fast.interrupt import Interrupt
with Interrupt().listening():
    print("ready", flush=True)
    {work}
"""


@pytest.mark.parametrize(
    "work",
    [
        "while True: signal.pause()",
        # Inside a library that lets no handler run, as when waiting for another rank.
        "import ctypes; ctypes.CDLL(None).poll(0, 0, -1) + ctypes.CDLL(None).poll(0, 0, -1)",
    ],
)
def test_a_second_ctrl_c_ends_at_once(work: str, tmp_path: Path) -> None:
    run = Run(sys.executable, "-c", BLOCKED.format(work=work), log=tmp_path / "log")
    run.wait_for(tmp_path / "log", 1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None, "the first one only asks"
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 130
    assert time.monotonic() - started < 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_p08_f04_x04_a_rank_that_fails_ends_all_within_half_a_minute(fault: str, tmp_path: Path) -> None:
    """P08, F04, X04: NaN in one rank's gradient skips the step on both; then a crash of one rank ends both."""
    bystander = subprocess.Popen(["sleep", "600"])
    worker = ROOT / "tests" / "workers" / "faulty_train.py"
    arguments = [1, f"1:nan,2:{fault}", *train()[2:], f"--run_dir={tmp_path / 'run'}"]
    run = Run(*LAUNCH, worker, *arguments, log=tmp_path / "log")
    run.wait_for(tmp_path / "run" / "metrics.jsonl", 1)
    started = time.monotonic()
    assert run.end() not in (0, None)
    assert time.monotonic() - started < PROMPT_END
    assert bystander.poll() is None, "only what the run started is ended"
    bystander.kill()
    bystander.wait()
    said = (tmp_path / "log").read_text()
    assert ("RuntimeError: broken on purpose" in said) == (fault == "raise"), said[-3000:]
    assert "gradient norm is nan; update skipped" in said
    assert [(r["step"], r["optimizer/skipped"]) for r in records(tmp_path / "run")] == [(1, 1.0)]
    assert not complete(tmp_path / "run" / "checkpoints"), "half a group of ranks saves nothing"


def test_what_was_asked_before_the_work_began_cuts_it_too(process_group: torch.device) -> None:
    interrupt = Interrupt()
    assert interrupt.cut_short(lambda: 1, lambda: 2) == 1
    interrupt.check()
    with interrupt.listening():
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.cut_short(lambda: 1, lambda: 2) == 2
    with pytest.raises(Interrupted, match="SIGTERM") as raised:
        interrupt.check()
    assert raised.value.number == signal.SIGTERM


def test_a_request_that_is_wrong_is_said_where_the_ranks_meet(process_group: torch.device) -> None:
    """Until then nothing is sampled: what is asked between takes no time."""

    class Wrong:
        calls = 0

        def sample(self, prompts: list[Prompt], group_sizes: list[int], **settings: object) -> list[Group]:
            self.calls += 1
            raise ValueError("prompt p is too long")

    interrupt, wrong, prompt = Interrupt(), Wrong(), Prompt("p", [1], "", {})
    sampler = InterruptibleSampler(wrong, interrupt)  # type: ignore[arg-type]
    for _ in range(2):
        (group,) = sampler.sample([prompt], [3])
        assert [rollout.completion_ids for rollout in group.rollouts] == [[]] * 3
    assert wrong.calls == 1
    with pytest.raises(ValueError, match="prompt p is too long"):
        interrupt.check()


def test_work_is_cut_where_it_stands_even_inside_a_broad_except() -> None:
    interrupt = Interrupt()

    def work() -> str:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            return "swallowed"
        return "went on"

    with interrupt.listening():
        assert interrupt.cut_short(work, lambda: "cut") == "cut"


def test_signals_that_were_ignored_stay_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        interrupt = Interrupt()
        with interrupt.listening():
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.number == 0 and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
