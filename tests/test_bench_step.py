"""The benches of whole updates: loads, floor, traffic, the table of the document, and that they run, at tiny sizes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
if not (ROOT / "bench").is_dir():
    pytest.skip("the benches are not beside these tests", allow_module_level=True)
sys.path.append(str(ROOT))  # behind what is installed: only `bench` is taken from here

from bench import operators, scaling, step, versus_trl  # noqa: E402
from bench.floor import update_flops  # noqa: E402
from bench.load import make_groups, spread_lengths  # noqa: E402
from fastrl_fast.memory import ModelSize  # noqa: E402
from fastrl_fast.ops._lib import kernels  # noqa: E402
from fastrl_fast.ops.fused_layers import rms_norm, swiglu  # noqa: E402
from fastrl_fast.ops.row_attention import row_attention, row_pieces  # noqa: E402

SIZE = ModelSize(layers=2, hidden=4, intermediate=8, queries=4, keys=4, vocabulary=10, tied=True)


def test_floor_by_hand():
    groups = make_groups(3, [[2, 4]])
    matrices = 2 * (4 * 4 * 4 + 3 * 4 * 8)
    apart = 2 * matrices * 12 + 4 * 4 * 2 * (5**2 + 7**2) / 2 + 2 * 40 * 6
    assert update_flops(SIZE, groups, shared=False) == 3 * apart
    together = 2 * matrices * 9 + 4 * 4 * 2 * (3**2 / 2 + (2 * 3 + 2) + (4 * 3 + 8)) + 2 * 40 * 6
    assert update_flops(SIZE, groups, shared=True) == 3 * together


def test_floor_counts_a_prompt_too_short_to_be_shared_for_each():
    """2 of 2 x 22 tokens would be spared."""
    groups = make_groups(2, [[20, 20]])
    assert update_flops(SIZE, groups, shared=True) == update_flops(SIZE, groups, shared=False)


def test_work_of_operators_by_hand():
    """A product, and attention of 2 x 3 heads forward and backward; what moves bytes faster than memory is a view."""
    a, b, c = torch.randn(64, 48), torch.randn(48, 80), torch.randn(1000)
    q, k = torch.randn(2, 3, 40, 8, requires_grad=True), torch.randn(2, 3, 50, 8)

    def run() -> None:
        a @ b
        c.view(10, 100)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.autograd.grad(out, q, torch.ones_like(out))

    found, seconds = operators.parts(run, bandwidth=0.0, repeats=2, row_flops=1.0)
    assert found["matrix products"].flops == 2 * 64 * 48 * 80 and found["matrix products"].calls == 1
    assert found["attention"].flops == (2 + 5) * 2 * (2 * 3 * 40) * 50 * 8 and found["attention"].calls == 2
    assert found["views"].calls >= 1 and found["views"].bytes == found["elementwise and copies"].bytes == 0
    assert sum(part.seconds for part in found.values()) == pytest.approx(seconds)
    assert operators.moved_bytes([[10, 100], [100], [], []]) == 4 * (1000 + 100 + 1000)


@pytest.mark.skipif(not kernels.FUSED_LAYERS, reason="this processor has no AVX2")
def test_compiled_attention_and_layers_are_counted():
    """Attention of rows by what it is said to compute, norms and gates by their bytes."""
    q, pieces = torch.randn(300, 4, 16, requires_grad=True), row_pieces([0, 300])

    def run() -> None:
        out = row_attention(q, q, q, pieces, 1.0)
        (swiglu(out, out) + rms_norm(out, out.detach()[0, 0], 1e-6)).sum().backward()

    found, _ = operators.parts(run, bandwidth=1e15, repeats=2, row_flops=7.0)
    assert found["attention"].flops == 7.0 and found["attention"].calls == 2 and found["attention"].seconds > 0
    assert found["elementwise and copies"].bytes > 10 * 4 * q.numel()


def test_floor_counts_kept_rollouts_alone():
    groups = make_groups(3, [[2, 4, 6], [1, 1, 1]], kept=2)
    assert [sum(r.kept for r in group.rollouts) for group in groups] == [2, 2]
    for group in groups:
        group.rollouts = [r for r in group.rollouts if r.kept]
    assert update_flops(SIZE, groups, shared=True) == update_flops(SIZE, make_like(groups), shared=True)


def make_like(groups):
    return make_groups(3, [[len(r.completion_ids) for r in group.rollouts] for group in groups])


def test_lengths_are_spread_from_low_to_high():
    lengths = torch.tensor(spread_lengths(8, 8, low=8, high=256)).double()
    assert (lengths.min(), lengths.max()) == (8, 256)
    # Evenly spaced logarithms: half of them below the geometric mean, 45.
    assert (lengths < 45.3).double().mean() == 0.5


def test_traffic_by_hand():
    """Two ranks and two micro-batches: half of P four times, less the root's twice; half once in float32."""
    root = SIZE.table + SIZE.hidden
    traffic = scaling.update_traffic(SIZE, ranks=2, width=2, microbatches=2)
    assert traffic == {"gather": (4 * SIZE.parameters - 2 * root) * 2 / 2, "reduce": SIZE.parameters * 4 / 2}
    assert scaling.update_traffic(SIZE, ranks=1, width=2, microbatches=2) == {"gather": 0, "reduce": 0}
    often = scaling.update_traffic(SIZE, ranks=2, width=2, microbatches=2, reductions=2)
    assert often == {"gather": traffic["gather"], "reduce": 2 * traffic["reduce"]}


def test_the_document_has_the_table_of_today():
    assert "\n".join(scaling.table()) in (ROOT / "docs" / "scaling.md").read_text()


def test_bench_step_runs(monkeypatch, tmp_path, capsys):
    """With phases, and with every variant of a layout of which pruning keeps one rollout in two."""
    layout = step.Layout("2 x 6/4", 6, [[4, 3], [2, 4]], 0.5, 1)
    monkeypatch.setattr(step, "layouts", lambda *, geometry_groups: [layout])
    file = tmp_path / "step.json"
    monkeypatch.setattr(sys, "argv", ["bench.step", "--quick", "--threads", "1", "--json", str(file)])
    assert step.main() == 0
    record = json.loads(file.read_text())
    assert [row["variant"] for row in record["rows"]] == [f"kept 1, {v}" for v in step.VARIANTS] + [*step.VARIANTS]
    assert all(0 < row["floor"] < row["timing"]["median"] for row in record["rows"]), "nothing beats its own GEMMs"
    assert set(record["phases"]) == set(step.PHASE_RUNS)
    for phases in record["phases"].values():
        assert 0 < phases["update"] < phases["step"]
    (line,) = record["ratios"]
    assert line.startswith("0.6M 2 x 6/4: plain packed / kept 1, shared prompt ")
    assert capsys.readouterr().out.endswith(line + "\n"), "the ratios come last"


HAS_TRL = importlib.util.find_spec("trl") is not None


@pytest.mark.reference
@pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed: pip install 'fastrl_fast[reference]'")
def test_bench_versus_trl_runs(monkeypatch, tmp_path):
    """Both sides agree on loss and gradient (main asserts it), and every figure is there."""
    monkeypatch.chdir(ROOT)  # its sides are `python -m bench.versus_side`
    file = tmp_path / "versus.json"
    arguments = ["--quick", "--threads", "1", "--sides", "ours", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench.versus_trl", *arguments])
    assert versus_trl.main() == 0
    medians = json.loads(file.read_text())["medians"]
    assert set(medians["planned"]) == {"ours plain", "ours mdap", "trl plain"}
    assert set(medians["sampled"]) == {"ours plain", "ours lot", "trl plain"}
    for row in (row for rows in medians.values() for row in rows.values()):
        assert 0 < row["update"] <= row["step"] and row["tokens"] > 0
    assert medians["planned"]["ours mdap"]["kept"] < medians["planned"]["ours plain"]["kept"] == 16


@pytest.mark.skipif(HAS_TRL, reason="TRL is installed")
def test_bench_versus_trl_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.versus_trl", "--quick"])
    with pytest.raises(SystemExit):
        versus_trl.main()
    assert "needs TRL: pip install 'fastrl_fast[reference]'" in capsys.readouterr().err
