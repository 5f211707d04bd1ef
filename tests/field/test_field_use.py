"""Public bug reports about data, installing and the command line, each on its smallest input."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_data import make_data, write

from fastrl_fast import cli
from fastrl_fast.run_folder import open_run_folder

ROOT = Path(__file__).parents[2]


def refused(*argv: str) -> str:
    with pytest.raises(ValueError) as error:
        cli.parse(list(argv), prog="train")
    return str(error.value)


def test_D03_a_prompt_that_is_too_long_is_dropped_in_every_form(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 40}, {"prompt": "y" * 4}]
    data = make_data(write(tmp_path / "d.jsonl", rows), max_prompt_tokens=30)
    assert len(data) == 1 and data.dropped_overlong == 1
    assert [(p.text, len(p.token_ids) <= 30) for p in data.first(2)] == [("y" * 4, True)]


def test_D04_fewer_prompts_than_a_step_needs_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    with pytest.raises(ValueError, match=r"data\.prompts_per_step must be at most 3"):
        make_data(path, prompts_per_step=8)
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens must be at least"):
        make_data(path, max_prompt_tokens=1)


def test_D03_half_a_surrogate_pair_has_no_power_over_ids(tmp_path: Path) -> None:
    """Not found out when the first checkpoint is written."""
    rows = [{"id": "\ud800", "prompt": "a", "answer": "\ud800"}, {"id": "b", "prompt": "b"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = make_data(str(tmp_path / "d.jsonl"))
    assert [prompt.id for prompt in data.first(2)] == ["\\ud800", "b"]
    assert data.state_dict()["fingerprint"]


def test_D07_columns_are_found_or_listed(tmp_path: Path) -> None:
    usual = make_data(write(tmp_path / "a.jsonl", [{"problem": "a", "solution": "1"}]))
    assert usual.first(1)[0].columns["answer"] == "1"
    with pytest.raises(ValueError, match=r"^data\.prompt_column .* has task, gold$"):
        make_data(write(tmp_path / "b.jsonl", [{"task": "a", "gold": "1"}]))


def test_V13_one_bos_whoever_writes_it(tmp_path: Path) -> None:
    from test_data import TOKENIZER

    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}])
    for template in (True, False):
        (prompt,) = make_data(path, chat_template=template).first(1)
        assert prompt.token_ids.count(TOKENIZER.bos_token_id) == 1


@pytest.mark.parametrize("text", ["1e-6", "5e-7", "1E-6", "1.0e-6"])
def test_X01_exponents_are_numbers(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"model: {{path: m}}\ndata: {{path: d}}\noptimizer: {{lr: {text}}}\n")
    config, _ = cli.parse(["--config", str(tmp_path / "c.yaml")], prog="train")
    assert config.optimizer.lr == float(text)
    assert "optimizer.lr" in refused("--optimizer.lr", "fast")


@pytest.mark.parametrize("broken", ["start", "log", "close"])
def test_X05_a_tracker_that_fails_does_not_end_the_run(broken: str, tmp_path: Path, capsys, monkeypatch) -> None:
    from test_metrics import METRICS

    from fastrl_fast import metrics

    class Offline:
        name = "wandb"

        def __init__(self) -> None:
            self.fail("start")

        def log(self, metrics: dict, step: int) -> None:
            self.fail("log")

        def close(self) -> None:
            self.fail("close")

        def fail(self, where: str) -> None:
            if where == broken:
                raise OSError("no network")

    monkeypatch.setattr(metrics, "build_tracker", lambda *_: Offline())
    log = metrics.RunLog(tmp_path, total_steps=2, trackers=["wandb"], settings={})
    log.trackers = log.trackers[:1]  # tensorboard may be there too
    for step in (1, 2):
        log.step(step, METRICS)
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert "no network" in capsys.readouterr().out


def test_X05_a_tracker_that_asks_for_a_login_gets_no_answer(tmp_path: Path, monkeypatch) -> None:
    from fastrl_fast.metrics import build_tracker

    module = types.ModuleType("wandb")
    module.init = lambda **_: [input("key? ")]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(EOFError):
        build_tracker("wandb", tmp_path, {})


def test_X05_a_run_that_nobody_watches_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "from test_metrics import METRICS\n"
        "from fastrl_fast.metrics import RunLog\n"
        "log = RunLog(pathlib.Path(sys.argv[1]), total_steps=3, trackers=[], settings={})\n"
        "for step in (1, 2, 3): log.step(step, METRICS)\n"
        "log.close()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "tests")]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    os.close(writer)
    assert (ended.returncode, len((tmp_path / "metrics.jsonl").read_text().splitlines())) == (0, 3), ended.stderr


def test_C03_a_torn_line_in_the_middle_of_the_metrics_does_not_stop_a_run(tmp_path: Path) -> None:
    from fastrl_fast.metrics import RunLog

    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "rew{"step": 2}\n\x00\x00\n{"step": 3}\n{"st')
    log = RunLog(tmp_path, total_steps=3, trackers=[], settings={})
    log.resume_at(2)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'


def test_X07_sizes_are_checked_before_a_model_is_loaded() -> None:
    assert "budget.group_size must be 2 or greater" in refused("--budget.group_size", "1")
    config, _ = cli.parse(["--data.prompts_per_step", "7", "--budget.group_size", "8"], prog="train")
    assert config.data.prompts_per_step == 7, "nothing has to divide"


def test_X09_there_is_no_search_for_a_batch_size() -> None:
    assert "unknown key 'auto_find_batch_size'" in refused("--auto_find_batch_size", "true")
    config, _ = cli.parse(["--updates.tokens_per_microbatch", "64"], prog="train")
    assert config.updates.tokens_per_microbatch == 64, "memory is bounded by tokens; groups may be split"


def test_I01_I06_the_build_needs_no_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = (\[.*?\])", text, re.M)
    assert requires is not None and json.loads(requires[1]) == ["scikit-build-core>=0.11", "pybind11>=3.0"]
    assert "flash-attn" not in text.split("[project.optional-dependencies]")[0]
    assert "Torch" not in (ROOT / "CMakeLists.txt").read_text().replace("torch's extensions", "")


def test_I03_the_number_of_compilers_is_bounded() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    assert "ENV{MAX_JOBS}" in text and "AVAILABLE_PHYSICAL_MEMORY" in text and "JOB_POOL_COMPILE" in text


def test_I04_I08_no_nvcc_and_no_gpu_are_asked_for() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    assert "check_language(CUDA)" in text, "CUDA is compiled where a compiler is found"
    assert "80-real 90-real 90-virtual" in text, "architectures are named, no GPU is looked at"


@pytest.mark.slow
def test_I09_nothing_touches_a_gpu_on_import() -> None:
    code = "import fastrl_fast.train, torch, sys; sys.exit(torch.cuda.is_initialized())"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0


def test_I12_what_the_rewards_import_is_declared() -> None:
    import ast

    text = (ROOT / "pyproject.toml").read_text()
    declared = {"math_verify", "mpmath", "numpy", "torch", "reasoning_gym", "rg"}
    assert all(name.replace("_", "-") in text or name == "rg" for name in declared)
    for path in (ROOT / "fastrl_fast" / "rewards").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (name.split(".")[0] for name in names):
                known = (*declared, "sympy", "latex2sympy2_extended", "")
                assert name in sys.stdlib_module_names or name in known, name


def test_X08_a_folder_that_cannot_be_written_is_told_at_the_start() -> None:
    config, _ = cli.parse([], prog="train")
    with pytest.raises(ValueError, match=r"run_dir: cannot make /proc/none"):
        open_run_folder(cli.to_dict(config) | {"run_dir": "/proc/none"}, "demo", total_steps=2)


def test_X08_metrics_that_cannot_be_written_end_the_run_with_one_line(tmp_path: Path) -> None:
    from test_metrics import METRICS

    from fastrl_fast.metrics import RunLog

    log = RunLog(tmp_path, total_steps=2, trackers=[], settings={})
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"^run_dir: cannot write .*metrics\.jsonl: "):
        log.step(1, METRICS)
    log.close()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1 of .* is not json"),
        ("d.json", b"[" * 100_000, "is not json"),
        ("d.jsonl", b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "line 1 of .* is not json"),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}', "row 2 of .*: column 'prompt' .*surrogates"),
        ("d.jsonl", '{"prompt":"a"}'.encode("utf-16"), "UTF-8"),
        ("d.jsonl.gz", b'{"prompt": "a"}', "gzip"),
        ("d.jsonl", b"[1, 2]", "line 1|row 1|object"),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "b', "line 2 of .* is not json"),
        ("d.parquet", b"PAR1xxxx", "parquet"),
    ],
)
def test_odd_data_files_are_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"(?i){message}") as error:
        make_data(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        ("--model.path", ""),
        ("--data.path", ""),
        ("--optimizer.lr", "nan"),
        ("--optimizer.lr=-1",),
        ("--budget.group_size", "8.5"),
        ("--seed", "1e400"),
        ("--rollout.temperature", "0"),
        ("--reward.functions", "[exact]"),
        ("--prune.align", "2", "--prune.weighting", "match"),
        ("--loss.kind", "gspo", "--loss.importance.kind", "token_mask"),
    ],
)
def test_odd_settings_are_one_line(argv: tuple[str, ...]) -> None:
    assert "\n" not in refused(*argv)
