"""A checkpoint is complete or not there, is written while training goes on, and the newest readable one is found."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastrl_fast import distributed
from fastrl_fast.checkpoint import Checkpointer, choose, complete, load_weights, shards

FAULTS = Path(__file__).parent / "workers" / "save_faults.py"


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    distributed.start()
    yield
    distributed.stop()


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lm = nn.Linear(3, 2)


def trained(seed: int, steps: int) -> tuple[Model, torch.optim.AdamW]:
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model.lm(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state=None, keep: int = 2):
    saver = Checkpointer(folder, keep=keep)
    saver.save(step, model, optimizer, state or {})
    saver.wait()


def load(folder: Path) -> tuple[dict | None, Model]:
    model, optimizer = trained(7, 1)
    return Checkpointer(folder, keep=2).load_newest(model, optimizer), model


def names(folder: Path) -> list[str]:
    return [path.name for path in complete(folder)]


def test_what_is_saved_comes_back_and_trains_on_alike(tmp_path: Path) -> None:
    model, optimizer = trained(0, 3)
    save(tmp_path, 3, model, optimizer, {"data": {"position": 7}})
    assert torch.equal(load_weights(choose(tmp_path))["weight"], model.lm.weight)
    other, other_optimizer = trained(1, 1)
    state = Checkpointer(tmp_path, keep=2).load_newest(other, other_optimizer)
    assert state == {"step": 3, "data": {"position": 7}}
    for m, o in ((model, optimizer), (other, other_optimizer)):
        m.lm(torch.ones(1, 3)).sum().backward()
        o.step()
    assert torch.equal(model.lm.weight, other.lm.weight)


def test_a_save_before_the_first_update_adds_no_step_to_the_optimizer(tmp_path: Path) -> None:
    """torch's own get_state_dict takes one to make the moments, which would move every later bias correction."""
    model, optimizer = trained(0, 0)
    save(tmp_path, 1, model, optimizer)
    other, other_optimizer = trained(1, 2)
    Checkpointer(tmp_path, keep=2).load_newest(other, other_optimizer)
    assert not optimizer.state and not other_optimizer.state


def test_none_is_none(tmp_path: Path) -> None:
    assert load(tmp_path / "absent")[0] is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        choose(tmp_path)


def test_the_newest_are_kept_by_number(tmp_path: Path) -> None:
    for step in (1, 999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, *trained(0, 1))
    assert names(tmp_path) == ["step_1000000", "step_1000001"]


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what the weights were, one save is in flight at most, and the end waits for it."""
    may_write, written = threading.Event(), []
    write = shards.write

    def slow(tensors: dict, path: Path) -> None:
        assert may_write.wait(30)
        write(tensors, path)
        written.append(path.parent.name)

    monkeypatch.setattr(shards, "write", slow)
    model, optimizer = trained(0, 1)
    then = model.lm.weight.detach().clone()
    saver = Checkpointer(tmp_path, keep=5)
    state = {"history": [1]}
    saver.save(1, model, optimizer, state)
    state["history"].append(2)
    with torch.no_grad():
        model.lm.weight.zero_()
    assert not written and not names(tmp_path), "save returned before anything was written"
    second = threading.Thread(target=saver.save, args=(2, model, optimizer, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second waits for the first"
    may_write.set()
    second.join(30)
    saver.wait()
    assert names(tmp_path) == ["step_000001", "step_000002"] and len(written) == 2
    (tmp_path / "step_000002" / "state.json").unlink()
    loaded, restored = load(tmp_path)
    assert loaded == {"step": 1, "history": [1]} and torch.equal(restored.lm.weight, then)


def test_c03_a_damaged_newest_falls_back_with_a_warning(tmp_path: Path) -> None:
    first, optimizer = trained(0, 1)
    save(tmp_path, 1, first, optimizer)
    save(tmp_path, 2, *trained(0, 2))
    shard = tmp_path / "step_000002" / "rank_00000.safetensors"
    whole = shard.read_bytes()
    record = tmp_path / "step_000002" / "state.json"
    state = record.read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    damage = [(shard, whole[:size]) for size in (0, 7, 10, len(whole) // 2, len(whole) - 1)]
    damage += [(shard, bytes(flipped)), (shard, None), (shard, whole + b"x")]
    damage += [(record, text) for text in (b"", b"[]", state[: len(state) // 2])]
    damage += [(record, state.replace(b'"ranks": 1', other)) for other in (b'"r": 1', b'"ranks": "1"')]
    for path, content in damage:
        shard.write_bytes(whole)
        record.write_bytes(state)
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.warns(UserWarning, match="step_000002 cannot be read"):
            found, model = load(tmp_path)
        assert found == {"step": 1} and torch.equal(model.lm.weight, first.lm.weight), (path.name, content)
        with pytest.raises(ValueError, match=r"run_dir: .*step_000002 cannot be read"):
            load_weights(choose(tmp_path))


def test_c03_nothing_readable_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 1, *trained(0, 1))
    (tmp_path / "step_000001" / "rank_00000.safetensors").unlink()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="none of the 1 checkpoints"):
        load(tmp_path)


def test_a_model_of_another_shape_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1, *trained(0, 1))
    model = nn.Module()
    model.lm = nn.Linear(4, 2)
    with pytest.warns(UserWarning, match="shape"), pytest.raises(ValueError, match="none of the 1 checkpoints"):
        Checkpointer(tmp_path, keep=1).load_newest(model, torch.optim.AdamW(model.parameters()))
    model.more = nn.Linear(1, 1)
    model.lm = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="no model.more"), pytest.raises(ValueError, match="none of the 1"):
        Checkpointer(tmp_path, keep=1).load_newest(model, torch.optim.AdamW(model.parameters()))


def test_unreadable_checkpoints_do_not_push_out_readable_ones(tmp_path: Path) -> None:
    """Resumed before damaged ones with keep = 1: counted by their names alone, these would be the newest ones."""
    for step in (10, 20, 30):
        save(tmp_path, step, *trained(0, step), keep=5)
    for damaged in ("step_000020", "step_000030"):
        (tmp_path / damaged / "rank_00000.safetensors").write_bytes(b"")
    saver = Checkpointer(tmp_path, keep=1)
    model, optimizer = trained(0, 1)
    with pytest.warns(UserWarning):
        assert saver.load_newest(model, optimizer) == {"step": 10}
    saver.save(15, model, optimizer, {})
    saver.wait()
    with pytest.warns(UserWarning):
        assert load(tmp_path)[0] == {"step": 15}
    saver.save(20, model, optimizer, {})
    saver.save(30, model, optimizer, {})
    saver.wait()
    assert load(tmp_path)[0] == {"step": 30} and names(tmp_path) == ["step_000030"]


def test_the_most_accurate_one_stays(tmp_path: Path) -> None:
    accuracies = {1: {"avg@1": 0.2}, 2: {"avg@1": 0.7, "ungraded": 9.0}, 3: {}, 4: {"avg@1": 0.7}, 5: {"avg@1": 0.1}}
    accuracies |= {6: {"avg@1": float("nan")}}
    saver = Checkpointer(tmp_path, keep=1)
    kept, weights = [], {}
    for step, accuracy in accuracies.items():
        model, optimizer = trained(0, step)
        weights[step] = model.lm.weight.detach().clone()
        saver.save(step, model, optimizer, {"accuracy": accuracy})
        saver.wait()
        kept.append([int(name[5:]) for name in names(tmp_path)])
    assert kept == [[1], [2], [2, 3], [4], [4, 5], [4, 6]]
    assert torch.equal(load_weights(choose(tmp_path, best=True))["weight"], weights[4])
    assert torch.equal(load_weights(choose(tmp_path))["weight"], weights[6])
    last = Checkpointer(tmp_path, keep=1, keep_best=False)
    last.save(7, *trained(0, 7), {})
    last.wait()
    assert names(tmp_path) == ["step_000007"]
    with pytest.raises(ValueError, match=r"no checkpoint in .* was measured"):
        choose(tmp_path, best=True)


def test_an_older_format_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "step_000005"
    old.mkdir()
    (old / "state.json").write_text('{"step": 5, "data": {}}')
    for read, folder in ((load, tmp_path), (load_weights, old)):
        with pytest.raises(ValueError, match=r"^run_dir: .*step_000005 has checkpoint format 1, .* reads format 2"):
            read(folder)


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """L15: they would push out the last good ones."""
    save(tmp_path, 1, *trained(0, 1), keep=1)
    model, optimizer = trained(0, 2)
    with torch.no_grad():
        model.lm.weight[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"step 2 cannot be written.*lm\.weight holds numbers that are not finite"):
        save(tmp_path, 2, model, optimizer, keep=1)
    assert load(tmp_path)[0] == {"step": 1}


def test_x08_too_little_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, *trained(0, 1), keep=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1, 1, 10))
    with pytest.raises(ValueError, match=r"^run_dir: .* step 2 cannot be written .*needs 0 MB, and 0 MB are free"):
        save(tmp_path, 2, *trained(0, 2), keep=1)
    assert os.listdir(tmp_path) == ["step_000001"]


def test_c04_a_save_that_fails_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, *trained(0, 1), keep=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = Checkpointer(tmp_path, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr("fastrl_fast.checkpoint.checkpointer._write_durably", full)
        saver.save(2, *trained(0, 2), {})
        saver.settle(30)
        assert saver.failed, "the trainer asks this at every step"
        with pytest.raises(ValueError, match=r"^run_dir: the checkpoint of step 2 cannot be written.*No space left"):
            saver.wait()
    assert os.listdir(tmp_path) == ["step_000001"] and not saver.failed
    # C05: what a killed save left is in nobody's way.
    (tmp_path / ".partial-step_000002" / "rank_00000.safetensors").mkdir(parents=True)
    save(tmp_path, 2, *trained(0, 2), keep=1)
    assert os.listdir(tmp_path) == ["step_000002"]
    assert json.loads((tmp_path / "step_000002" / "state.json").read_text())["state"] == {"step": 2}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "checkpoints", Path("/proc/none/checkpoints")):
        with pytest.raises(ValueError, match=rf"^run_dir: the checkpoint of step 1 cannot be written to {folder}"):
            save(folder, 1, *trained(0, 1))


def test_every_instant_of_a_save(tmp_path: Path) -> None:
    """C03, C04, C05, X08: killed, or without space, at each file operation: the newest good one loads, and the next
    save works and leaves nothing behind."""
    env = {**os.environ, "PYTHONPATH": str(FAULTS.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, FAULTS, tmp_path], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    tries = [json.loads(line) for line in done.stdout.splitlines()]
    hit = [t for t in tries if t.get("hit") != ""]
    assert {t["kind"] for t in hit} == {"crash", "error"} and len(hit) > 30
    assert any("half a file" in t.get("hit", "") for t in hit) and any("rename" in t.get("hit", "") for t in hit)
    for t in tries:
        assert t["right"] and t["step"] in (2, 3) and t["files"] == t["after"] == ["step_000004"], t
        assert t.get("hit") != "" or t["step"] == 3, "without a fault the save is there"
        if t.get("message"):
            assert t["message"].startswith("run_dir: the checkpoint of step 3 cannot be written")
        if t["kind"] == "error" and t["step"] == 2:
            assert t["message"], f"a save that did not come about must be told: {t}"


@given(ranks=st.integers(1, 9), rows=st.integers(0, 40))
def test_rows_are_those_of_fsdp(ranks: int, rows: int) -> None:
    parts = [rows_of for rows_of in (shards.rows_of(r, ranks=ranks, rows=rows) for r in range(ranks))]
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    assert [list(range(*part)) for part in parts] == chunks + [[]] * (ranks - len(chunks))


def test_moments_of_a_name_that_goes_on_after_another(tmp_path: Path) -> None:
    """`w` and `w.exp_avg.deep` are both names that a model may have."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2))
    model.register_module("w2", nn.Module())
    model.w2.exp_avg = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, random.Random(0).random())
    optimizer.step()
    save(tmp_path, 1, model, optimizer)
    before = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    optimizer.state.clear()
    Checkpointer(tmp_path, keep=1).load_newest(model, optimizer)
    for ours, theirs in zip(optimizer.state.values(), before, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_any_number_of_ranks_reads_what_any_other_wrote_and_all_fail_together(tmp_path: Path) -> None:
    """C08; a rank that alone cannot write or read takes the others along, within the time of a barrier."""
    worker = FAULTS.with_name("resharding.py")
    env = {**os.environ, "PYTHONPATH": str(FAULTS.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, worker, tmp_path], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    for change in ("1 to 2", "2 to 1", "2 to 2", "2 to 3", "3 to 2"):
        saved = results[f"save {change[0]}"][0]["digest"]
        assert len(saved) == 4 + 3 * 36, "four step counters, and 36 parameters with two moments each"
        assert all(rank == {"step": 2, "digest": saved} for rank in results[change]), change
    for rank in results["broken"]:
        assert "step 2 cannot be written" in rank["message"] and "No space left" in rank["message"]
        assert rank["complete"] == ["step_000001"]
    first = results["first"][0]["digest"]
    assert all(rank == {"step": 1, "digest": first} for rank in results["blind"]), "the older one, on both ranks"
