"""A checkpoint is complete or not there, and the newest readable one is found."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fastrl_fast import distributed
from fastrl_fast.checkpoint import Checkpointer, complete, load_weights


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


def test_what_is_saved_comes_back_and_trains_on_alike(tmp_path: Path) -> None:
    model, optimizer = trained(0, 3)
    Checkpointer(tmp_path, keep=2).save(3, model, optimizer, {"data": {"position": 7}})
    assert torch.equal(load_weights(tmp_path)["weight"], model.lm.weight)
    other, other_optimizer = trained(1, 1)
    state = Checkpointer(tmp_path, keep=2).load_newest(other, other_optimizer)
    assert state == {"step": 3, "data": {"position": 7}}
    for m, o in ((model, optimizer), (other, other_optimizer)):
        m.lm(torch.ones(1, 3)).sum().backward()
        o.step()
    assert torch.equal(model.lm.weight, other.lm.weight)


def test_none_is_none(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "absent", keep=1).load_newest(*trained(0, 1)) is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        load_weights(tmp_path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        Checkpointer(tmp_path, keep=2).save(step, *trained(0, 1), {})
    assert [folder.name for folder in complete(tmp_path)] == ["step_000003", "step_000004"]


def test_c03_a_damaged_newest_falls_back_with_a_warning(tmp_path: Path) -> None:
    first, optimizer = trained(0, 1)
    Checkpointer(tmp_path, keep=2).save(1, first, optimizer, {})
    Checkpointer(tmp_path, keep=2).save(2, *trained(0, 2), {})
    for shard in (tmp_path / "step_000002").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:10])
    model, other = trained(5, 1)
    with pytest.warns(UserWarning, match="step_000002"):
        state = Checkpointer(tmp_path, keep=2).load_newest(model, other)
    assert state == {"step": 1}
    assert torch.equal(model.lm.weight, first.lm.weight)


def test_c03_nothing_readable_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    Checkpointer(tmp_path, keep=2).save(1, *trained(0, 1), {})
    (tmp_path / "step_000001" / ".metadata").unlink()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="none of the 1 checkpoints"):
        Checkpointer(tmp_path, keep=2).load_newest(*trained(0, 1))


def test_c04_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpointer(tmp_path, keep=1).save(1, *trained(0, 1), {})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fastrl_fast.checkpoint._write_durably", full)
        with pytest.raises(ValueError, match=r"^run_dir: the checkpoint of step 2 cannot be written.*No space left"):
            Checkpointer(tmp_path, keep=1).save(2, *trained(0, 2), {})
    assert [folder.name for folder in complete(tmp_path)] == ["step_000001"]
    # C05: the leftover of the failed save is in nobody's way.
    Checkpointer(tmp_path, keep=1).save(2, *trained(0, 2), {})
    assert [folder.name for folder in complete(tmp_path)] == ["step_000002"]
    assert not list(tmp_path.glob(".partial-*"))
    assert json.loads((tmp_path / "step_000002" / "state.json").read_text())["step"] == 2
