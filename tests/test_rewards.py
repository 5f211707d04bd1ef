"""The grader: batches, killable workers, and the faults that must cost one completion and no more."""

import asyncio
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastrl_fast.rewards import Grader, total


@dataclass
class Term:
    name: str
    weight: float = 1.0


ROOT = Path(__file__).parents[1]
HANGS = """
def hang(prompts, completions, **columns):
    while "loop" in completions:
        pass
    return [1.0 for _ in completions]
"""
HANGS_IN_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "loop":
        pass
    return 1
"""
DIES = """
import ctypes, os
def die(completions, **columns):
    if "die" in completions:
        {death}
    return [1.0] * len(completions)
"""
LOUD = """
import sys
def loud(completions, **columns):
    print("x" * 100_000)
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)
"""


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def alive(pid):
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def math_grader():
    with Grader([Term("math"), Term("format", 0.5)], workers=2, timeout=10) as grader:
        yield grader


# --- the batch ----------------------------------------------------------------------------------------------------


def test_every_completion_gets_its_own_value(math_grader):
    count = 300
    completions = [
        rf"<thinking>{i}</thinking>\boxed{{{i % 7}}}" if i % 3 else rf"\boxed{{{i % 7}}}" for i in range(count)
    ]
    values = math_grader.grade([f"p{i // 4}" for i in range(count)], completions, {"answer": ["3"] * count})
    assert values == [{"math": float(i % 7 == 3), "format": float(i % 3 != 0)} for i in range(count)]
    rewards = [total(math_grader.terms, value) for value in values]
    assert rewards[:5] == [0.0, 0.5, 0.5, 1.0, 0.5]
    assert math_grader.grade([], [], {"answer": []}) == []


def test_total_is_nan_where_a_term_could_not_be_graded():
    terms = [Term("a", 2.0), Term("b", 0.5)]
    assert total(terms, {"a": 1.0, "b": 1.0}) == 2.5
    assert math.isnan(total(terms, {"a": None, "b": 1.0}))


def test_r04_ungradable_gold_is_none_through_the_pool(math_grader):
    values = math_grader.grade(["p"] * 3, [r"\boxed{5}", "garbage", ""], {"answer": ["", None, "see figure"]})
    assert [value["math"] for value in values] == [None, None, None]


def test_several_batches_at_once(math_grader):
    handles = [math_grader.submit(["p"] * 50, [rf"\boxed{{{k}}}"] * 50, {"answer": list(range(50))}) for k in range(8)]
    for k, handle in reversed(list(enumerate(handles))):
        assert [value["math"] for value in handle.result()] == [float(i == k) for i in range(50)]
        assert handle.done


def test_messages_are_graded_as_text(math_grader):
    completion = [{"role": "assistant", "content": r"\boxed{5}"}]
    assert math_grader.grade(["p"], [completion], {"answer": [5]}) == [{"math": 1.0, "format": 0.0}]


def test_bad_columns_are_named(math_grader):
    with pytest.raises(ValueError, match="'math' needs the column 'answer'; the data has: solution"):
        math_grader.grade(["p"], ["c"], {"solution": ["5"]})
    with pytest.raises(ValueError, match="answer has 1 entries for 2 completions"):
        math_grader.grade(["p", "p"], ["c", "c"], {"answer": ["5"]})
    with pytest.raises(ValueError, match="prompts has 1 entries for 2 completions"):
        math_grader.grade(["p"], ["c", "c"], {"answer": ["5", "5"]})


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([], "at least one reward"),  # R07
        ([Term("maths")], r"unknown reward 'maths' \(did you mean 'math'\?\); built in: math, exact, number, format"),
        ([Term("math"), Term("math")], "named once"),
    ],
)
def test_r07_bad_terms_fail_at_construction(terms, message):
    with pytest.raises(ValueError, match=message):
        Grader(terms, workers=1, timeout=1)


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (1, 0.0), (1, math.nan)])
def test_bad_settings_fail_at_construction(workers, timeout):
    with pytest.raises(ValueError, match="got"):
        Grader([Term("format")], workers=workers, timeout=timeout)


# --- where it is called from: R02 ---------------------------------------------------------------------------------

THIRD = (["p", "p"], [r"The answer is \boxed{\frac{1}{3}}", r"\boxed{x<3}"], {"answer": [r"\frac{1}{3}", "x<3"]})


def test_r02_from_a_thread(math_grader):
    got = []
    thread = threading.Thread(target=lambda: got.append(math_grader.grade(*THIRD)))
    thread.start()
    thread.join()
    assert [value["math"] for value in got[0]] == [1.0, 1.0]


def test_r02_from_asyncio(math_grader):
    async def both():
        handle = math_grader.submit(*THIRD)
        return await asyncio.to_thread(handle.result), math_grader.grade(*THIRD)

    waited, blocked = asyncio.run(both())
    assert [value["math"] for value in waited] == [value["math"] for value in blocked] == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_r02_in_a_forked_child(math_grader):
    context = multiprocessing.get_context("fork")
    before = set(math_grader.worker_pids())
    results = context.SimpleQueue()

    def child():
        values = math_grader.grade(*THIRD)
        results.put(([value["math"] for value in values], set(math_grader.worker_pids())))
        math_grader.close()

    process = context.Process(target=child)
    process.start()
    values, pids = results.get()
    process.join(20)
    assert process.exitcode == 0
    assert values == [1.0, 1.0]
    assert pids and not pids & before
    assert wait_until(lambda: not any(map(alive, pids)))
    assert set(math_grader.worker_pids()) == before and all(map(alive, before))
    assert [value["math"] for value in math_grader.grade(*THIRD)] == [1.0, 1.0]


def test_a_worker_imports_neither_torch_nor_transformers():
    heavy = "('torch', 'transformers', 'sympy', 'numpy')"
    code = f"import sys, fastrl_fast.rewards.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- hanging and dying --------------------------------------------------------------------------------------------


def test_r03_a_hanging_completion_costs_only_itself(tmp_path):
    with Grader([Term(write(tmp_path, HANGS) + ":hang"), Term("format")], workers=2, timeout=1.0) as grader:
        (name, _), before = (term.name for term in grader.terms), set(grader.worker_pids())
        for step in range(1, 3):
            start = time.monotonic()
            values = grader.grade(["p"] * 8, ["ok"] * 3 + ["loop"] + ["ok"] * 4, {})
            assert [value[name] for value in values] == [1.0] * 3 + [0.0] + [1.0] * 4
            assert [value["format"] for value in values] == [0.0] * 8
            assert time.monotonic() - start < 15
            assert grader.counters == {"timeouts": step, "worker_deaths": 0, "errors": 0, "retries": step}
        assert wait_until(lambda: len(grader.worker_pids()) == 2)
        pids = before | set(grader.worker_pids())
        assert len(pids) > 2  # somebody was replaced
    assert not any(map(alive, pids))


def test_r01_one_by_one_rewards_lose_one_timeout_only(tmp_path):
    with Grader([Term("verl:" + write(tmp_path, HANGS_IN_VERL) + ":compute_score")], workers=1, timeout=0.5) as grader:
        values = grader.grade(["p"] * 8, ["ok"] * 3 + ["loop"] + ["ok"] * 4, {})
        assert [next(iter(value.values())) for value in values] == [1.0] * 3 + [0.0] + [1.0] * 4
        assert grader.counters == {"timeouts": 1, "worker_deaths": 0, "errors": 0, "retries": 0}


@pytest.mark.parametrize(
    "death",
    [
        "os._exit(3)",
        "os.kill(os.getpid(), 11)",
        "ctypes.string_at(0)",
        "bytearray(1 << 40)",  # beyond the limit of memory
        "os.close(3), os.close(4), os._exit(0)",
    ],
)
def test_a_completion_that_ends_its_worker_costs_only_itself(tmp_path, death):
    path = write(tmp_path, DIES.format(death=death)) + ":die"
    with Grader([Term(path)], workers=1, timeout=20) as grader:
        values = grader.grade(["p"] * 4, ["ok", "die", "ok", "ok"], {})
        assert [value[path] for value in values] == [1.0, 0.0, 1.0, 1.0]
        assert grader.counters == {"timeouts": 0, "worker_deaths": 1, "errors": 0, "retries": 1}
        assert [value[path] for value in grader.grade(["p"] * 2, ["ok", "ok"], {})] == [1.0, 1.0]


def test_memory_limit_can_be_set(tmp_path):
    text = "def big(completions, **columns):\n    return [float(len(bytearray(int(c))) > 0) for c in completions]\n"
    path = write(tmp_path, text) + ":big"
    with Grader([Term(path)], workers=1, timeout=20, memory_bytes=1 << 30) as grader:
        values = grader.grade(["p"] * 2, [str(1 << 20), str(1 << 31)], {})
        assert [value[path] for value in values] == [1.0, 0.0]


def test_a_worker_killed_while_idle_blames_nobody():
    with Grader([Term("exact")], workers=1, timeout=20) as grader:
        for pid in grader.worker_pids():
            os.kill(pid, signal.SIGKILL)
            assert wait_until(lambda pid=pid: not alive(pid))
        assert grader.grade(["p"], ["5"], {"answer": ["5"]}) == [{"exact": 1.0}]
        assert grader.counters["worker_deaths"] == 1


def test_what_a_reward_started_is_killed_with_its_worker(tmp_path):
    text = (
        "import subprocess\n"
        "def spawn(completions, note, **columns):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    open(note[0], 'w').write(str(child.pid))\n"
        "    child.wait()\n"
    )
    note = tmp_path / "pid"
    with Grader([Term(write(tmp_path, text) + ":spawn")], workers=1, timeout=0.5) as grader:
        grader.grade(["p"], ["c"], {"note": [str(note)]})
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_prints_and_reads_of_a_reward_do_no_harm(tmp_path, capfd):
    path = write(tmp_path, LOUD) + ":loud"
    with Grader([Term(path)], workers=1, timeout=20) as grader:
        assert grader.grade(["p"], ["c"], {}) == [{path: 1.0}]


# --- ending -------------------------------------------------------------------------------------------------------


def test_close_fails_what_was_waited_for_and_leaves_no_process(tmp_path):
    grader = Grader([Term(write(tmp_path, HANGS) + ":hang")], workers=2, timeout=1000)
    pids = grader.worker_pids()
    handle = grader.submit(["p"], ["loop"], {})
    time.sleep(0.2)
    grader.close()
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.result()
    with pytest.raises(RuntimeError, match="closed"):
        grader.submit(["p"], ["loop"], {})
    assert not any(map(alive, pids))


SCRIPT = """
import signal, sys, time
from fastrl_fast.rewards import Grader
# A shell that starts its jobs in the background makes them ignore Ctrl-C, and so their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Term:
    name, weight = sys.argv[1], 1.0
if __name__ == "__main__":
    grader = Grader([Term], workers=2, timeout=1000)
    handle = grader.submit(["a"] * 8 + ["b"] * 8, ["loop"] * 16, {})
    time.sleep(0.3)
    print(*grader.worker_pids(), flush=True)
    {then}
"""


@pytest.mark.parametrize("how", ["kill", "interrupt", "exit", "exception"])
def test_no_orphans_however_the_parent_ends(tmp_path, how):
    """With workers in the middle of an endless loop, which look at nothing."""
    then = {"exit": "sys.exit(0)", "exception": "raise KeyError('x')"}.get(how, "handle.result()")
    script = write(tmp_path, SCRIPT.replace("{then}", then), "main.py")
    parent = subprocess.Popen(
        [sys.executable, script, write(tmp_path, HANGS) + ":hang"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if how in ("kill", "interrupt"):
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
    parent.wait(20)
    parent.stdout.close()
    assert wait_until(lambda: not any(map(alive, pids)))
