"""Every report of README.md is accounted for: by a test that names it, or by a reason."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS = HERE.parents[2] / "shared" / "cases" / "field_reports.md"
ROW = re.compile(r"^\| ([A-Z]\d\d) \| (.+) \| (.+) \|$", re.M)


def table() -> dict[str, str]:
    rows = ROW.findall((HERE / "README.md").read_text(encoding="utf-8"))
    assert len({name for name, _, _ in rows}) == len(rows), "each report once"
    return {name: what for name, _, what in rows}


def functions() -> dict[str, str]:
    """The name and docstring of every test of the repository, by name."""
    found = {}
    for path in HERE.parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = f"{node.name} {ast.get_docstring(node) or ''}"
    return found


def test_every_report_has_a_test_that_names_it_or_a_reason() -> None:
    tests = functions()
    for report, what in table().items():
        if what.startswith("- "):
            assert len(what) > 10, report
            continue
        named = re.match(r"`(test_\w+)`", what)
        assert named is not None and named[1] in tests, f"{report}: {what}"
        assert report.lower() in tests[named[1]].lower(), f"{named[1]} does not name {report}"


def test_every_test_of_this_folder_is_in_the_table() -> None:
    reports = table()
    for path in HERE.glob("test_field_*.py"):
        for name in re.findall(r"^def test_((?:[A-Z]\d\d_)+)", path.read_text(encoding="utf-8"), re.M):
            assert set(name.strip("_").split("_")) <= reports.keys(), name


def test_the_table_holds_every_report() -> None:
    assert len(table()) == 133
    if not REPORTS.exists():
        pytest.skip("the reports themselves are not here (../shared/cases/field_reports.md)")
    assert list(table()) == re.findall(r"^### (\w+)", REPORTS.read_text(encoding="utf-8"), re.M)
