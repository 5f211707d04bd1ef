"""Every fenced block of the README and of the documents runs, or is held against the program that it is for.

A page is worked through in a folder of its own: blocks that start with `# NAME.py` or `# NAME.yaml` become these files;
then, in order, Python runs, YAML is read as settings, and each command of a bash block goes to the rule for it
(`RULES`), with small things in the place of what this machine has not got. A block in another language fails.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.run

pytest.importorskip("matplotlib", reason="the report's pictures need matplotlib: pip install 'fastrl_fast[report]'")

from fastrl_fast import cli, console, train
from fastrl_fast.builtin import resolve_model
from fastrl_fast.report.charts import CHARTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = ("text",)
"""Languages of blocks that are pictures of something, not to be run."""
SMALL = ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=24", "--eval.prompts=8"]
RUNS = ("NAME", "OTHER", "PLAIN", "FASTRL", "sums", "plain")
"""Names that the documents give to runs; here all are copies of one."""
NOT_RUN = {
    r"python3? -m venv \S+": "makes an environment, and pip would load the network's packages into it",
    r"\. \S+/bin/activate": "the same",
    r"pytest": "these are its tests",
    r"(?:\w+=\S+ )*(?:vllm serve|python -m vllm\.\S+) .*": "starts a server of another program",
    r"pip uninstall .*": "this environment is not the reader's",
    r"srun .*": "needs Slurm; its inner command is the one above it in the page",
}
"""Commands that are only read, and why."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it starts, its language, and what is in it."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                language = lines[start - 1].removeprefix("```").split(" ")[0]
                yield Block(page, start, language, "\n".join(lines[start : number - 1]) + "\n")
                start = None
    assert start is None, f"{page.name}: the block of line {start} has no end"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, for commands that look at one."""
    folder = tmp_path_factory.mktemp("documents") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *SMALL, "--max_steps=2", "--log.profile_steps=[2]", f"--run_dir={folder}"])
        assert train.main() == 0
    return folder


@pytest.fixture
def workplace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout as the reader of a page stands in it, with runs of every name in it; what is written stays here."""
    monkeypatch.chdir(tmp_path)
    # Most of a report's time goes into its pictures, which have tests of their own.
    monkeypatch.setattr("fastrl_fast.report.page.CHARTS", CHARTS[:1])
    write_files(PAGES[0])
    for name in ("bench", "profiles", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in RUNS:
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs/profiled/profile").mkdir(parents=True)
    shutil.copy(finished / "profile/step-2.json.gz", tmp_path / "runs/profiled/profile/step-4.json.gz")
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 8)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_the_page_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    write_files(page)
    for block in blocks(page):
        try:
            if block.language == "python":
                run_python(block, names)
            elif block.language == "yaml":
                check_yaml(block)
            elif block.language == "bash":
                for command in commands(block.text):
                    run_command(command, monkeypatch)
            else:
                assert block.language in PROSE, f"nothing here runs a block in {block.language or 'no language'}"
        except Exception as error:
            raise AssertionError(f"{page.name}, block of line {block.line}: {type(error).__name__}: {error}") from error


def test_every_exception_is_needed() -> None:
    texts = [block.text for page in PAGES for block in blocks(page) if block.language == "bash"]
    every = [command for text in texts for command in commands(text)]
    for pattern in [*NOT_RUN, *RULES]:
        assert any(re.fullmatch(pattern, command, re.S) for command in every), f"no command for {pattern}"


def write_files(page: Path) -> None:
    """The files that the page shows; other pages may speak of the README's."""
    for block in blocks(page):
        if name := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):
            Path(name[1]).write_text(block.text)


def run_python(block: Block, names: dict[str, object]) -> None:
    if "integrations.trl" in block.text:
        pytest.importorskip("trl", reason="the plug-in's example needs TRL: pip install 'fastrl_fast[reference]'")
    exec(compile(smaller(block.text), f"{block.page.name}:{block.line}", "exec"), names)


def smaller(code: str) -> str:
    """With the shipped model in the place of one from the hub, and one step."""
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(resolve_model("builtin:demo")))
    fewer = "max_steps=1, max_completion_length=8, use_cpu=True, bf16=False, report_to=[]"
    return re.sub(r"max_steps=\d+", fewer, code)


def check_yaml(block: Block) -> None:
    """Settings that are valid by themselves, or over those of the default run."""
    Path("block.yaml").write_text(block.text)
    cli.parse(["--config", "demo", "--config", "block.yaml"], prog="train")


def commands(text: str) -> Iterator[str]:
    """The commands of a bash block, continued lines joined, comments off; a here-document with its command."""
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        if end := re.search(r"<<'(\w+)'", line):
            document = [line]
            while document[-1] != end[1]:
                document.append(next(lines))
            yield "\n".join(document)
        elif line.strip() and not line.startswith("#"):
            yield from re.split(r" && ", re.sub(r"\s+# .*", "", line.strip()))


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern, rule in RULES.items():
        if found := re.fullmatch(pattern, command, re.S):
            with contextlib.redirect_stdout(io.StringIO()):
                rule(shlex.split(found.groups()[-1] or "") if found.groups() else [], command, monkeypatch)
            return
    assert any(re.fullmatch(pattern, command, re.S) for pattern in NOT_RUN), f"no rule for the command: {command}"


def check_train(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's own options by its parser; ours by a dry run, with the shipped model in the place of one that would
    have to be loaded, or by our parser alone where the data would."""
    if launched := re.match(r"torchrun (.*-m fastrl_fast\.train)", command):
        torch.distributed.run.get_args_parser().parse_args(shlex.split(launched[1]))
    arguments = [word for word in words if word != cli.DRY_RUN]
    config, _ = cli.parse(arguments, prog="train")
    if config.data.path.startswith("demo:") or Path(config.data.path).is_file():
        arguments += ["--model.path", "builtin:demo", cli.DRY_RUN]
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        assert train.main() == 0


def run_module(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate, export, report, doctor: really, on the small run."""
    module, *arguments = words
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    # The doctor's 1 says that this machine lacks something.
    allowed = (0, 1) if module == "doctor" else (0,)
    assert importlib.import_module(f"fastrl_fast.{module}").main() in allowed


class Parsed(Exception):
    """The arguments were understood."""


def parse_only(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench, up to where its own parser has accepted the arguments."""
    script, *arguments = words
    accept = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: object, **named: object) -> None:
        accept(parser, arguments)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(ROOT / Path(script).parent))
        patch.syspath_prepend(str(ROOT))
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(Parsed):
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")


def check_extras(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would install of ours exists; it is not installed."""
    text = (ROOT / "pyproject.toml").read_text()
    for name in (name for word in words for extras in re.findall(r"\[(.+)\]", word) for name in extras.split(",")):
        assert re.search(rf"^{name} = \[", text, re.M), f"pyproject.toml has no extra {name!r}"


def really(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bash, with this Python, where every script of the profilers only shows what it would do."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "DRY_RUN": "1"}
    done = subprocess.run(["bash", "-c", command], env=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def check_profiler(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's options by its parser, and the script by its own dry run."""
    settings, options, script = re.fullmatch(r"((?:\w+=\S+ )*)torchrun (.*) (profiles/\w+\.sh .*)", command).groups()
    torch.distributed.run.get_args_parser().parse_args([*shlex.split(options), "script"])
    check_train(words[1:], "", monkeypatch)
    really([], f"{settings}{script}", monkeypatch)


def check_completion(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints its script, where shtab is installed."""
    pytest.importorskip("shtab", reason="completion needs shtab: pip install 'fastrl_fast[completion]'")
    monkeypatch.setattr(sys, "argv", ["fastrl", "completion", "bash"])
    with pytest.raises(SystemExit, match="0"):
        console.main()


def check_summary(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really where there is the file, else as far as its options."""
    if Path(words[0]).exists() and "limits.json" not in words:
        really(words, command, monkeypatch)
    else:
        parse_only(["profiles/summarize.py", *words], command, monkeypatch)


RULES: dict[str, Callable[[list[str], str, pytest.MonkeyPatch], None]] = {
    r"(?:torchrun .*?-m fastrl_fast\.|python -m fastrl_fast\.|fastrl )train(.*)": check_train,
    r"(?:python -m fastrl_fast\.|fastrl )((?:evaluate|export|report|doctor).*)": run_module,
    r"pip install (.*)": check_extras,
    r"python -m (bench\..*)": parse_only,
    r"python (bench/.*)": parse_only,
    r"python profiles/summarize\.py (.*)": check_summary,
    r"(?:\w+=\S+ )*torchrun .* (profiles/.*)": check_profiler,
    r"bench/gpu\.sh --dry-run": really,
    r"export (?:\w+=\S+ ?)+": really,
    r"cat > [\w.]+ <<'(\w+)'\n.*": really,
    r'eval "\$\(fastrl completion bash\)"': check_completion,
}
"""Patterns of commands and what is done with them; the last group is handed over as words."""
