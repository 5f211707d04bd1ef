"""What the documents say about the code is so."""

import dataclasses
import re
import sys
from pathlib import Path

from fastrl_fast import cli, ops
from fastrl_fast.alarms import ALARMS
from fastrl_fast.foreign_names import OPENRLHF, TRL, VERL

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import settings_page  # noqa: E402


def test_the_name_table_lists_every_foreign_name() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", (ROOT / "docs" / "moving.md").read_text(), re.M)
    assert rows == [pair for table in (TRL, VERL, OPENRLHF) for pair in table.items()]


def test_the_table_of_alarms_lists_every_alarm() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "report.md").read_text(), re.M)
    assert rows == [alarm.name for alarm in ALARMS]


def test_the_readme_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    tree = re.search(r"```text\n(.+?)```", text, re.S)
    assert tree is not None, "the README shows the file tree"
    for line in tree[1].splitlines():
        for name in line.split("  ")[0].split():
            assert list(ROOT.glob(name)), f"README names {name}, which is not there"


def test_the_tree_in_contributing_names_every_module_of_the_package() -> None:
    tree = re.search(r"```text\n(.+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert tree is not None, "CONTRIBUTING shows the file tree"
    package = ROOT / "fastrl_fast"
    named = {line.split()[0] for line in tree[1].splitlines() if "  " in line}
    named |= set(re.findall(r"\b\w+\.py\b", tree[1]))
    for name in named:
        assert list(ROOT.glob(name)) or list(ROOT.glob(f"*/{name}")), f"CONTRIBUTING names {name}, which is not there"
    modules = {path.name for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name for name in modules if not name.startswith("__")} - named == set()


def test_the_page_of_settings_has_every_setting_with_its_default_and_text() -> None:
    page, row = settings_page.page(), re.compile(r"^\| `(\w+)` \| (.+?) \| (`.+?`|must be given) \| (.+) \|$")
    found, section = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = "" if line == "## At the top" else f"{line.removeprefix('## ')}."
        if cells := row.match(line):
            found[section + cells[1]] = cells[3].strip("`")
    settings = {name: kind for name, kind in cli.known_keys().items() if not dataclasses.is_dataclass(kind)}
    assert found.keys() == settings.keys()
    config, _ = cli.parse(["--config", "demo", "--config", "grpo"], prog="train")
    untouched = {**cli.to_dict(config)["rollout"], "max_completion_tokens": 1024}
    del untouched["vllm"]  # a section
    for name, value in untouched.items():
        assert found[f"rollout.{name}"] == repr(value)
    assert found["model.path"] == "must be given" and found["optimizer.betas"] == "(0.9, 0.999)"


def test_the_api_page_has_every_operator() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: fastrl_fast\.ops\.\w+\.(\w+)$", text, re.M)) | set(re.findall(r"`([A-Z_]+)`", text))
    assert shown == set(ops.__all__)


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), settings_page.PAGE])
