"""The report says what the run folder holds, whatever state that is in, and nothing in it can act on the page."""

import base64
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

pytest.importorskip("matplotlib", reason="the report's pictures need matplotlib: pip install 'fastrl_fast[report]'")

from fastrl_fast import cli, report, train
from fastrl_fast.drop_reasons import DROP_REASONS
from fastrl_fast.report import charts, sample
from fastrl_fast.report.charts import CHARTS, draw, running_mean
from fastrl_fast.report.comparison import compare
from fastrl_fast.report.facts import alarms, facts, flops, merged, plain, seconds
from fastrl_fast.report.paper import PAPER
from fastrl_fast.report.run import Run, read_runs
from fastrl_fast.report.terminal import BARS, show, sparkline

STEPS = 4
ARGS = ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=24", "--eval.prompts=8"]
ARGS += ["--eval.samples=4", "--eval.every=2", "--reward.workers=1", "--loss.kl_coef=0.01", f"--max_steps={STEPS}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with everything that a report can show."""
    folder = tmp_path_factory.mktemp("report") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *ARGS, f"--run_dir={folder}"])
        assert train.main() == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    shutil.copytree(finished, tmp_path / "plain", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    return tmp_path / "plain"


@pytest.fixture
def one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and numbers: most of a page's time goes into its pictures."""
    monkeypatch.setattr("fastrl_fast.report.page.CHARTS", CHARTS[:1])


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Page(HTMLParser):
    """What a browser would see of a page: tags with their attributes, texts, and the cells of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "data":
            self.rows[-1][-1] = dict(attributes)["value"]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1] and self.tags[-1][0] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, label: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == label)


def write_page(*folders: Path, refresh: bool = False) -> Page:
    out = folders[0] / "report.html"
    report.report(list(folders), out, refresh=refresh)
    return Page(out)


def test_the_page_has_the_numbers_of_the_run(finished: Path, tmp_path: Path, one_picture: None) -> None:
    out = tmp_path / "page.html"
    report.report([finished], out)
    page, steps = Page(out), records(finished / "metrics.jsonl")
    for name, value in steps[-1].items():
        assert float(page.row(name)[0]) == value, name
    totals = json.loads((finished / "summary.json").read_text())["totals"]
    for label, name in [
        ("rollouts sampled", "rollouts/generated"),
        ("rollouts trained on", "rollouts/kept"),
        ("dropped: similar", "dropped/similar"),
        ("tokens sampled", "tokens/generated"),
        ("tokens trained", "tokens/trained"),
        ("time: update", "seconds/update"),
        ("time of all steps", "seconds/step"),
    ]:
        assert float(page.row(label)[0]) == pytest.approx(totals[name], rel=1e-12), label
    spent = sum(totals[f"flops/{part}"] for part in ("generation", "old", "reference", "update"))
    assert float(page.row("FLOPs spent")[0]) == pytest.approx(spent, rel=1e-12)
    saved = sum(totals[f"flops_saved/{part}"] for part in ("old", "reference", "update"))
    assert saved > 0 and float(page.row("FLOPs saved by pruning")[0]) == pytest.approx(saved, rel=1e-12)
    assert float(page.row("reward, start")[0]) == pytest.approx(sum(s["reward/mean"] for s in steps[:2]) / 2)
    assert float(page.row("reward, end")[0]) == pytest.approx(sum(s["reward/mean"] for s in steps[2:]) / 2)
    assert float(page.row("held-out pass@4, latest")[0]) == steps[-1]["eval/pass@4"]
    assert float(page.row("KL to the reference in nats")[0]) == pytest.approx(
        sum(s["policy/kl"] for s in steps) / STEPS
    )
    dead, count = (sum(s[name] for s in steps) for name in ("groups/dead", "groups/count"))
    assert float(page.row("dead groups")[0]) == pytest.approx(dead / count)
    assert f"finished after {STEPS} steps" in page.text


def test_every_chart_draws_what_metrics_jsonl_holds(folder: Path) -> None:
    steps = records(folder / "metrics.jsonl")
    write(
        folder / "metrics.jsonl",
        [step | {"prune/fidelity": 0.9 + step["step"] / 100, "policy/importance": 1.0} for step in steps],
    )
    run = Run.read(folder, "plain")
    figures = {chart.name: draw(chart, [run]) for chart in CHARTS}
    assert all(figures.values()), "every chart has something to show"

    def line(name: str, place: int = 0) -> list[float]:
        return list(figures[name].axes[0].lines[place].get_ydata())

    for name, metric in [
        ("reward", "reward/mean"),
        ("kept", "rollouts/kept_fraction"),
        ("entropy", "policy/entropy"),
        ("kl", "policy/kl"),
        ("sampler_gap", "policy/sampler_gap"),
        ("length", "completion/length"),
        ("truncated", "completion/truncated_fraction"),
    ]:
        assert line(name) == [step[metric] for step in steps], name
    assert line("fidelity") == pytest.approx([0.91, 0.92, 0.93, 0.94])
    assert line("dead") == [step["groups/dead"] / step["groups/count"] for step in steps]
    assert line("tokens", 1) == [step["tokens/trained"] for step in steps]
    before = json.loads((folder / "summary.json").read_text())["before"]
    assert line("accuracy") == [before["avg@4"], steps[1]["eval/avg@4"], steps[3]["eval/avg@4"]]
    assert list(figures["accuracy"].axes[0].lines[0].get_xdata()) == [0, 2, 4]
    tops = figures["dropped"].axes[0].collections[-1].get_paths()[0].vertices[:, 1]
    assert max(tops) == max(step["rollouts/generated"] for step in steps), "kept and dropped add up to all"


def test_a_long_line_is_a_running_mean_over_the_steps_themselves(folder: Path) -> None:
    step = records(folder / "metrics.jsonl")[0]
    write(folder / "metrics.jsonl", [step | {"step": i + 1, "reward/mean": float(i % 2)} for i in range(50)])
    faint, mean = draw(CHARTS[0], [Run.read(folder, "a")]).axes[0].lines
    assert list(faint.get_ydata()) == [float(i % 2) for i in range(50)]
    assert list(mean.get_ydata()) == [0.0] + [0.5] * 49
    assert running_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


def test_runs_of_the_papers_jobs_stand_beside_its_numbers(folder: Path, one_picture: None) -> None:
    assert "Beside the FastRL paper" not in write_page(folder).text
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("demo:train", "hiyouga/geometry3k"))
    steps = records(folder / "metrics.jsonl")
    write(folder / "metrics.jsonl", [step | {"eval/pass@16": 0.75, "seconds/step": 1800.0} for step in steps])
    page = write_page(folder)
    paper, ours = ([cell.strip() for cell in page.row(name)] for name in ("paper: GRPO + FastRL", "plain"))
    assert paper == ["55.9", "", "52.63", "77.23", "13.87", "2.14", "249.7"]
    assert float(ours[0]) == pytest.approx(100 * steps[-1]["eval/avg@4"], rel=1e-3)
    assert ours[1:] == ["75", "", "", "2", "1", "1,800"]
    # Its quotients of hours, to the last digit.
    for rows in PAPER.values():
        for name, (*_, hours, faster, _) in rows.items():
            assert rows[name.split(" + ")[0]][4] / hours == pytest.approx(faster, abs=0.0101), name


NASTY = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{1}{ </td></table> {{ 7*7 }} &lt; \u202e漢\u2028"
)


def test_nothing_in_a_run_can_act_on_the_page(folder: Path) -> None:
    """Tags, quotes, template marks, TeX, control characters and half characters from every place data comes from."""
    rollouts = records(folder / "rollouts.jsonl")[:4]
    for rollout in rollouts:
        rollout |= {
            "prompt": NASTY + "\x00\x1b[31m",
            "answer": NASTY,
            "completion": NASTY + "\ud800",
            "drop_reason": NASTY,
        }
        rollout |= {"kept": False, "rewards": {NASTY: 1.0}}
    rollouts[-1] |= {"reward": float("nan"), "advantage": None}
    write(folder / "rollouts.jsonl", rollouts)
    steps = records(folder / "metrics.jsonl")
    write(folder / "metrics.jsonl", [step | {f"reward/{NASTY}": 0.5, f"dropped/{NASTY}": 1.0} for step in steps])
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("builtin:demo", json.dumps(NASTY)))
    wicked = folder.with_name("_<b>$x_{ & 'run'\"")
    folder.rename(wicked)
    page = write_page(wicked)
    known = {"html", "head", "meta", "title", "style", "body", "header", "h1", "nav", "a", "p", "strong", "span"}
    known |= {"section", "h2", "div", "table", "tr", "th", "td", "data", "figure", "figcaption", "img", "details"}
    known |= {"summary", "pre", "br"}
    assert {tag for tag, _ in page.tags} <= known
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "img" or attributes["src"].startswith("data:image/svg+xml;base64,")
        assert tag != "a" or attributes["href"].startswith("#")
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script" not in policy
    assert page.text.count(NASTY) > 4 * 2
    assert NASTY + "␀␛[31m" in page.text and NASTY + "\\ud800" in page.text
    assert wicked.name in page.text
    for _, attributes in page.tags:
        if "src" in attributes:
            svg = ElementTree.fromstring(base64.b64decode(attributes["src"].partition(",")[2]))
            assert not [e.tag for e in svg.iter() if e.tag.endswith(("script", "}a", "foreignObject", "}image"))]


def test_the_document_names_every_metric(finished: Path) -> None:
    named = re.findall(r"`(\w+/[\w@]+)`", (Path(__file__).parents[1] / "docs/report.md").read_text())
    patterns = [re.sub(r"(PHASE|REASON|NAME|K)$", "@", name) for name in named]
    only_ahead = {"rollout/staleness", "rollout/seconds"}
    for metric in {name for step in records(finished / "metrics.jsonl") for name in step} - {"step"} | only_ahead:
        assert metric in named or any(p.endswith("@") and metric.startswith(p.rstrip("@")) for p in patterns), metric


def test_the_page_is_whole_in_itself(finished: Path, tmp_path: Path) -> None:
    report.report([finished], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.findall(r"https?://", text), "no address but those inside the pictures"
    assert Page(tmp_path / "page.html").text.count("kept") > 1
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_several_runs_stand_beside_each_other(folder: Path, one_picture: None) -> None:
    """The second run costs half, is right twice as often, and has one step less."""
    other = folder.with_name("half")
    shutil.copytree(folder, other)
    halved = []
    for step in records(folder / "metrics.jsonl")[:-1]:
        half = {k: v / 2 for k, v in step.items() if k.startswith(("seconds/", "flops/", "tokens/"))}
        better = {k: v * 2 for k, v in step.items() if k.startswith("eval/")}
        halved.append(step | half | better)
    write(other / "metrics.jsonl", halved)
    (other / "summary.json").unlink()
    runs = read_runs([folder, other])
    comparison = compare(runs)
    assert comparison.steps == STEPS - 1
    assert [ratio for _, ratio in comparison.rows[0].cells] == [None] * len(comparison.head)
    ratios = dict(zip(comparison.head, (ratio for _, ratio in comparison.rows[1].cells), strict=True))
    for name in ("time of steps", "time of score and update", "FLOPs", "FLOPs of training", "tokens trained"):
        assert ratios[name] == pytest.approx(2.0), name
    assert ratios["held-out avg@4"] == ratios["held-out pass@4"] == 2.0, "of step 2, which both have"
    page = write_page(folder, other)
    assert "Comparison over the first 3 steps" in page.text
    assert [float(v) for v in page.row("tokens/trained")] == [
        records(path / "metrics.jsonl")[-1]["tokens/trained"] for path in (folder, other)
    ]
    for chart in CHARTS:
        figure = draw(chart, runs)
        if figure and chart.kind == "lines":
            labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
            assert any("plain" in label for label in labels) and any("half" in label for label in labels)
    assert compare(runs[:1]) is None


def test_accuracy_is_compared_at_the_steps_that_all_runs_have(folder: Path) -> None:
    other = folder.with_name("longer")
    shutil.copytree(folder, other)
    steps = records(other / "metrics.jsonl")
    doubled = [step | {k: 2 * v for k, v in step.items() if k.startswith("eval/avg")} for step in steps]
    write(other / "metrics.jsonl", [*doubled, steps[-1] | {"step": STEPS + 1, "eval/avg@4": 99.0}])
    comparison = compare(read_runs([folder, other]))
    ratios = dict(zip(comparison.head, (ratio for _, ratio in comparison.rows[1].cells), strict=True))
    assert comparison.steps == STEPS and ratios["held-out avg@4"] == 2.0


def test_runs_of_one_name_are_told_apart_by_their_paths(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "plain"
    shutil.copytree(folder, other)
    assert [run.name for run in read_runs([folder, other])] == [str(folder), str(other)]
    assert [run.name for run in read_runs([folder, folder])] == ["plain"]


def test_unfinished_cut_and_damaged_runs_are_one_clear_line(folder: Path, one_picture: None) -> None:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    (folder / "summary.json").unlink()
    metrics.write_bytes(b"".join(lines[:3]) + lines[3][:100])
    page = write_page(folder)
    assert f"not finished: 3 of {STEPS} steps so far" in page.text
    assert "metrics.jsonl: the last line is cut; it is left out" in page.text
    metrics.write_bytes(lines[0] + b"\x00\xff garbage\n[1]\n" + lines[2] + lines[1] + lines[2])
    run = Run.read(folder, "run")
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert run.notes == [
        "metrics.jsonl: 2 lines cannot be read; they are left out",
        "metrics.jsonl: 1 steps are there twice; the later ones count",
    ]
    metrics.write_bytes(lines[0].replace(b'"policy/kl": ', b'"policy/kl": null, "x": ').replace(b"}", b', "y": NaN}'))
    assert Run.read(folder, "run").notes == ["metrics.jsonl: 2 values were not finite; they are left out"]
    (folder / "summary.json").write_text('{"steps": ')
    assert "summary.json cannot be read; it is left out" in write_page(folder).text


def test_a_run_without_a_step_is_a_page_too(folder: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        (folder / name).write_bytes(b"")
    page = write_page(folder)
    assert "no step is done yet" in page.text and "No step is done yet." in page.text
    assert [fact.label for fact in facts(Run.read(folder, "a")) if fact.value is not None] == ["steps"]
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        (folder / name).unlink()
    assert "no rollouts are written" in write_page(folder).text
    assert compare(read_runs([folder, folder])) is None


def test_a_run_that_was_given_more_steps_is_not_finished_before_they_are_done(folder: Path) -> None:
    steps = records(folder / "metrics.jsonl")
    write(folder / "metrics.jsonl", [*steps, steps[-1] | {"step": STEPS + 1}])
    assert not Run.read(folder, "a").finished


def test_what_is_no_run_is_one_line(tmp_path: Path, folder: Path, one_picture: None, monkeypatch, capsys) -> None:
    def line(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["report", *args])
        with pytest.raises(SystemExit) as ended:
            cli.run(report.main)
        assert ended.value.code == 2
        (only,) = capsys.readouterr().err.strip().splitlines()
        return only

    assert "is not the folder of a run" in line(str(tmp_path))
    assert "--out: cannot write" in line(str(folder), "--out", str(tmp_path / "none" / "page.html"))
    (folder / "config.yaml").write_text("a: [")
    assert "config.yaml is not valid YAML" in line(str(folder))


def test_the_page_follows_a_run_that_goes_on(folder: Path, one_picture: None, monkeypatch) -> None:
    """Each look finds a step more, the last one the summary; between looks that find nothing new nothing is written."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    summary = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_bytes(lines[0])
    out = folder / "report.html"
    seen: list[tuple[str, bool]] = []

    def goes_on() -> Iterator[None]:
        for line in lines[1:]:
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(line)
            yield
        yield
        (folder / "summary.json").write_bytes(summary)
        yield

    events = goes_on()

    def sleep(seconds: float) -> None:
        page = Page(out)
        state = re.search(r"(not )?finished\D+\d", page.text)[0]
        seen.append((state, any(a.get("http-equiv") == "refresh" for _, a in page.tags)))
        next(events)

    monkeypatch.setattr(time, "sleep", sleep)
    runs = report.watch(report.report([folder], out, refresh=True), out)
    states = [("not finished: 1", True), ("not finished: 2", True), ("not finished: 3", True)]
    assert seen == [*states, ("not finished: 4", True), ("not finished: 4", True)]
    assert runs[0].finished
    assert not any(a.get("http-equiv") == "refresh" for _, a in Page(out).tags), "a finished page stays as it is"


def test_samples_are_whole_groups_of_beginning_middle_and_end(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    rows = [
        {"step": step, "prompt_id": f"{step}-{group}", "prompt": [{"role": "user", "content": "q"}], "reward": r % 3}
        for step in range(1, 41)
        for group in range(3)
        for r in range(4)
    ]
    write(path, [row | {"completion": "x" * 100} for row in rows])
    monkeypatch.setattr(sample, "WINDOW_BYTES", 6000)
    notes: list[str] = []
    samples = sample.read_samples(path, notes)
    assert notes == [] and len(samples) == 6
    assert all(len(s.rollouts) == 4 and len({r["prompt_id"] for r in s.rollouts}) == 1 for s in samples)
    steps = [s.step for s in samples]
    assert steps == sorted(steps) and steps[0] == 1 and 15 < steps[2] < 25 and steps[-1] >= 39
    assert samples[0].prompt == "user: q" and samples[0].answer == ""
    path.write_bytes(path.read_bytes()[:-10])
    sample.read_samples(path, notes)
    assert notes == ["rollouts.jsonl: the last line is cut; it is left out"]


def test_the_most_telling_group_of_a_step_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    dull = [{"step": 1, "prompt_id": "dull", "prompt": "a", "reward": 0.0, "drop_reason": ""}] * 4
    telling = [{"step": 1, "prompt_id": "b", "prompt": "b", "reward": float(i), "drop_reason": ""} for i in range(4)]
    write(path, dull + telling)
    assert [s.prompt for s in sample.read_samples(path, [])] == ["a", "b"]
    write(path, [row | {"prompt_id": f"{i}"} for i in range(9) for row in dull] + telling)
    assert "b" in [s.prompt for s in sample.read_samples(path, [])]


def test_the_terminal_shows_the_same_numbers_plain_when_piped(finished: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fastrl_fast.report", str(finished), "--out", str(tmp_path / "page.html")]
    done = subprocess.run([*command, "--png", str(tmp_path / "png")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "│" not in done.stdout
    page = {row[0]: row[1] for row in Page(tmp_path / "page.html").rows if len(row) == 2}
    shown = dict(
        re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines() if re.search(r"\S\s{2,}\S", line)
    )
    for label in ("rollouts sampled", "tokens trained"):
        assert float(shown[label].replace(",", "")) == float(page[label])
    pictures = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert "reward.png" in pictures and "flops.png" in pictures
    assert (tmp_path / "png" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_colours_trends_and_no_markup(folder: Path, capsys) -> None:
    wicked = folder.with_name("[bold]x\x1b]0;")
    folder.rename(wicked)
    steps = records(wicked / "metrics.jsonl")
    write(wicked / "metrics.jsonl", [step | {"alarm/dead_groups": float(step["step"] > 2)} for step in steps])
    show(read_runs([wicked]), Console(force_terminal=True, width=100))
    out = capsys.readouterr().out
    assert "[bold]x␛]0;" in out and "\x1b]0;" not in out
    assert "╭" in out and "\x1b[1m" in out and BARS[-1] in out
    assert "alarm dead groups: first in step 3, in 2 steps" in out
    assert ("dead groups", 3, 2) in alarms(read_runs([wicked])[0])


def test_small_things() -> None:
    assert [flops(v) for v in (0.0, 999.0, 1e3, 2.5e9, 1e22)] == [
        "0 FLOP",
        "999 FLOP",
        "1 kFLOP",
        "2.5 GFLOP",
        "10 ZFLOP",
    ]
    assert [seconds(v) for v in (0.25, 119.0, 120.0, 5400.0)] == ["0.25 s", "119 s", "2.0 min", "1.50 h"]
    assert [plain(v) for v in (0.0, 1234.0, 0.123456, 123456.7, float("inf"))] == [
        "0",
        "1,234",
        "0.1235",
        "123,457",
        "inf",
    ]
    assert merged([["a", "c"], ["a", "b", "c", "d"], ["e", "c"]]) == ["e", "a", "b", "c", "d"]
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([0.0, 2.0, 8.0, 8.0], width=2) == "▁█"


def test_no_two_layers_have_one_colour() -> None:
    layers = 1 + len(DROP_REASONS)
    assert len({charts._colour(place) for place in range(layers)}) == layers


BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """What a headless browser writes out, and the messages of its console."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium-headless-shell")
def test_a_browser_draws_every_picture_and_complains_about_nothing(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report.report([finished], page)
    _, complaints = browse(page, f"--screenshot={tmp_path / 'page.png'}", "--window-size=1400,4000")
    assert complaints == []
    assert (tmp_path / "page.png").stat().st_size > 50_000
    text, probe = page.read_text(), tmp_path / "probe.html"
    script = "<script>document.title = [...document.images].map(i => i.naturalWidth).join(' ')</script>"
    probe.write_text(text.replace("</body>", f"{script}</body>"))
    assert browse(probe, "--dump-dom")[1], "the page's policy refuses scripts, and this is how a complaint looks"
    probe.write_text(re.sub(r"<meta http-equiv=.Content-Security.*", "", text).replace("</html>", f"{script}</html>"))
    loaded = "<script>addEventListener('load', () => {"
    probe.write_text(probe.read_text().replace("<script>", loaded).replace("</script>", "})</script>"))
    dom, _ = browse(probe, "--dump-dom")
    widths = [int(width) for width in re.search(r"<title>([\d ]+)</title>", dom)[1].split()]
    assert len(widths) == len([chart for chart in CHARTS if draw(chart, [Run.read(finished, "a")])])
    assert min(widths) > 300
