"""The comparison's arithmetic on made-up runs: intervals, pairing, ratios, costs, and the document."""

import argparse
import json
import statistics
import sys
from pathlib import Path

import pytest

from fastrl_fast import cli
from fastrl_fast.data import sources

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # behind what is installed: only `bench` is taken from here

from bench import methods, methods_document, methods_report, methods_runs  # noqa: E402


def write_run(folder: Path, name: str, *, avg: float, update: float, saved: float = 0.0, evals=(), **others) -> None:
    """A finished run of two steps: `update` TFLOPs and as many seconds, half of each in a step."""
    path = folder / name
    path.mkdir()
    totals = {"flops/generation": 1e12, "flops/old": 0.0, "flops/reference": 0.0, "flops/update": update * 1e12}
    totals |= {"flops_saved/old": 0.0, "flops_saved/reference": 0.0, "flops_saved/update": saved * 1e12}
    totals |= {"rollouts/generated": 100.0, "rollouts/kept": 25.0}
    totals |= {"seconds/update": update, "seconds/score": 1.0, "seconds/step": 9.0}
    steps = [
        {"step": i, "seconds/step": 4.5, "prune/fidelity": 0.5 + 0.25 * i}
        | {name: value / 2 for name, value in totals.items() if name.startswith("flops/")}
        | ({"eval/avg@8": accuracy} if accuracy is not None else {})
        for i, accuracy in enumerate(evals or (None, avg))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    summary = {"after": {"avg@8": avg, "pass@8": avg + 0.1}, "totals": totals | others}
    (path / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path: Path) -> list[methods_runs.Run]:
    for seed, avg in enumerate([0.5, 0.6, 0.7]):
        write_run(tmp_path, f"grpo-plain-{seed}", avg=avg, update=4.0, saved=4.0)
        write_run(tmp_path, f"grpo-fastrl-{seed}", avg=avg + 0.1, update=2.0 / (seed + 1), evals=(0.6, avg + 0.1))
    write_run(tmp_path, "dapo-plain-0", avg=0.9, update=1.0)
    write_run(tmp_path, "grpo-fastrl-7", avg=0.0, update=1.0, evals=(0.0, 0.0))
    (tmp_path / "grpo-aero-0").mkdir()
    return methods_runs.find(tmp_path)


def rows(table: str) -> dict[str, dict[str, str]]:
    head, _, *others = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in others}


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (4, 2.776), (9, 2.262), (15, 2.131), (20, 2.086), (30, 2.042)])
def test_intervals_are_student_s(freedom, t):
    """Published quantiles, on values whose standard error is 1."""
    values = [(-1.0) ** i for i in range(freedom + 1)]
    scale = (len(values) ** 0.5) / statistics.stdev(values)
    assert methods_report.half([scale * v for v in values]) == pytest.approx(t, abs=5e-3)
    assert methods_report.interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert (methods_report.interval([0.25]), methods_report.interval([])) == ("0.250", "")


def test_finished_runs_are_found_plain_first(runs):
    assert [(r.objective, r.method, r.seed) for r in runs] == [
        ("dapo", "plain", 0),
        *(("grpo", "plain", seed) for seed in range(3)),
        *(("grpo", "fastrl", seed) for seed in (0, 1, 2, 7)),
    ]
    assert runs[1].fidelity == 0.625 and runs[1].steps == 2


def test_differences_are_paired_by_seed(runs):
    """Every seed gains .1: the difference has no spread though both methods have one; a seed without plain is out."""
    pairs = methods_report.paired(runs, "grpo", "fastrl")
    assert [(plain.seed, run.seed) for plain, run in pairs] == [(0, 0), (1, 1), (2, 2)]
    row = rows(methods_report.accuracy_table(runs))["grpo fastrl"]
    assert (row["seeds"], row["avg@8 - plain"], row["pass@8 - plain"]) == ("4", "0.100 ± 0.000", "0.100 ± 0.000")
    assert rows(methods_report.accuracy_table(runs))["dapo plain"]["avg@8"] == "0.900"
    alone = [run for run in runs if run.method != "plain"]
    row = rows(methods_report.accuracy_table(alone))["grpo fastrl"]
    assert row["avg@8 - plain"] == row["all FLOPs ÷"] == "", "nothing to compare with"


def test_ratios_are_means_of_each_seed_s(runs):
    """4 / 2, 4 / 1, 4 / (2 / 3): mean 4; against all rollouts, 8 TFLOPs in plain, twice as much."""
    row = rows(methods_report.accuracy_table(runs))["grpo fastrl"]
    spread = methods_report.half([2.0, 4.0, 6.0])
    assert row["training FLOPs ÷"] == f"4.00 ± {spread:.2f}"
    assert row["training FLOPs ÷ of all rollouts"] == f"8.00 ± {2 * spread:.2f}"
    whole = methods_report.interval([5 / 3, 5 / 2, 5 / (1 + 2 / 3)], 2)
    assert row["all FLOPs ÷"] == whole
    assert row["all FLOPs ÷ of all rollouts"] == methods_report.interval([9 / 3, 9 / 2, 9 / (1 + 2 / 3)], 2)
    assert row["score + update time ÷"] == whole, "update and one second of score, as sampling is one TFLOP here"
    plain = rows(methods_report.accuracy_table(runs))["grpo plain"]
    assert (plain["training FLOPs ÷"], plain["training FLOPs ÷ of all rollouts"]) == ("1.00 ± 0.00", "2.00 ± 0.00")
    assert (row["kept"], row["rollouts"], row["fidelity"]) == ("25%", "100", "0.62")


def test_cost_to_plain_s_end(runs):
    """Plain ends at .6 in the mean: fastrl's first evaluation is there in three of four runs."""
    table = rows(methods_report.cost_table(runs))
    assert table["grpo fastrl"]["reached by"] == "3 of 4"
    costs = [(1 + 2.0 / (seed + 1)) / 2 for seed in range(3)]
    assert table["grpo fastrl"]["to plain's end: TFLOPs"] == f"{statistics.median(costs):.3f}"
    assert table["grpo fastrl"]["seconds"] == "4", "4.5 of its 9, rounded"
    assert (table["grpo plain"]["reached by"], table["grpo plain"]["seconds"]) == ("2 of 3", "9")
    assert table["grpo plain"]["update TFLOPs"] == "4.000" and table["grpo plain"]["update s"] == "4.0"


def test_the_document_names_command_seeds_date_commit(runs, tmp_path):
    path = tmp_path / "methods_table.md"
    text = methods_document.write_document({"demo": runs, "smollm2": []}, path, "abc1234")
    assert path.read_text() == text
    for part in ("`python -m bench.methods`", "seeds 0, 1, 2, 7", "2 steps", str(runs[0].finished), "commit abc1234"):
        assert part in text
    assert methods_report.accuracy_table(runs) in text and methods_report.cost_table(runs) in text
    assert "SmolLM2" not in text, "a setting without runs has no section"
    with pytest.raises(ValueError, match="no finished runs"):
        methods_document.write_document({"demo": []}, path, None)


def options(setting: str, folder: Path) -> argparse.Namespace:
    return argparse.Namespace(setting=setting, steps=8, eval_prompts=16, out=folder)


ORDERED = [pair for pair in methods.SETTINGS["demo"].runs if pair.partition("-")[2] in methods.FIRST]
EVERY = [f"grpo-{method}" for method in (*methods.METHODS, *methods.VARIANTS)]


@pytest.mark.parametrize("setting", methods.SETTINGS)
def test_every_run_s_arguments_are_settings(setting, tmp_path):
    """They parse, and the loss is the objective's own under every method, grpo's that of plain GRPO."""
    pairs = methods.SETTINGS[setting].runs if setting != "demo" else sorted({*ORDERED, *EVERY})
    losses = {}
    for pair in ("grpo-plain", "dapo-plain", "gspo-plain", *pairs):
        objective, _, method = pair.partition("-")
        config, _ = cli.parse(methods.arguments(objective, method, 3, options(setting, tmp_path)), prog="train")
        assert config.loss == losses.setdefault(objective, config.loss), pair
        assert (config.seed, config.max_steps, config.eval.samples) == (3, 8, 8)
        assert (config.prune.method == "none") == (method in ("plain", "plain_small", "greso", "every_rollout"))


def test_sums_are_right_and_held_out(tmp_path):
    methods.write_sums(tmp_path)
    train, heldout = (sources.load_rows(str(tmp_path / f"{name}.jsonl"), "train") for name in ("train", "heldout"))
    for row in train:
        a, b = row["question"].removeprefix(methods.SHOTS).removesuffix(" =").split(" + ")
        assert int(a) + int(b) == int(row["answer"])
    assert len(heldout) > 200 and not {r["question"] for r in train} & {r["question"] for r in heldout}
    for shot in methods.SHOTS.splitlines():
        terms, total = shot.split(" = ")
        assert sum(map(int, terms.split(" + "))) == int(total)
