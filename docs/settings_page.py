"""Hook of mkdocs: writes the page of settings from the dataclasses, so that it cannot be out of date.

It reads the source and imports nothing: a machine that builds the documents needs neither torch nor the kernels.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fastrl_fast"
MODULES = ("config", "data_config", "rollout_config", "method_config", "loss_config")
PAGE = "settings.md"
INTRO = """# Every setting

Made from the dataclasses of `fastrl_fast/config.py` and its parts when these pages were built. In a YAML file sections
are mappings (`prune: {tau: 0.7}`), on the command line dots (`--prune.tau 0.7`); `--help` says the same.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a dataclass as its source has it."""

    name: str
    type: str
    default: str
    text: str


def on_files(files, config):  # mkdocs calls it by these names
    """Add the page to those of the folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The page in Markdown: a table per section, in the order of Config."""
    classes = {name: node for module in MODULES for name, node in _classes(module)}
    aliases = {name: text for module in MODULES for name, text in _aliases(module)}
    lines = [INTRO]
    for section, name in _sections("Config", classes):
        lines += [f"\n## {section or 'At the top'}\n", ast.get_docstring(classes[name]) if section else "", ""]
        lines += ["| setting | type | default | |", "| --- | --- | --- | --- |"]
        for setting in fields(classes[name]):
            if setting.type not in classes:
                kind = aliases.get(setting.type, setting.type)
                cells = (f"`{setting.name}`", _code(kind), _code(setting.default), _cell(setting.text))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sections(name: str, classes: dict[str, ast.ClassDef], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted sections with their classes, each before those inside it."""
    yield path, name
    for setting in fields(classes[name]):
        if setting.type in classes:
            yield from _sections(setting.type, classes, f"{path}.{setting.name}".strip("."))


def fields(node: ast.ClassDef) -> Iterator[Setting]:
    """The annotated fields of a class with the strings under them."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = inspect.cleandoc(str(after.value.value))
            default = _default(statement.value)
            yield Setting(statement.target.id, ast.unparse(statement.annotation), default, text)


def _default(value: ast.expr | None) -> str:
    """As source; of field(default_factory=...) what it makes; empty where there is none."""
    if not isinstance(value, ast.Call):
        return ast.unparse(value) if value else ""
    factory = next(word.value for word in value.keywords if word.arg == "default_factory")
    return ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else f"{ast.unparse(factory)}()"


def _classes(module: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            yield node.name, node


def _aliases(module: str) -> Iterator[tuple[str, str]]:
    """Names of types, such as PruneMethod, with what they stand for."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            (target,) = node.targets
            yield ast.unparse(target), ast.unparse(node.value)


def _tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def _code(text: str) -> str:
    """As code, where there is any; `list()` and its like as what they make."""
    empty = {"list()": "[]", "dict()": "{}"}
    kind = text.removeprefix("Literal[").removesuffix("]").replace("'", "") if text.startswith("Literal[") else text
    return f"`{_cell(empty.get(kind, kind))}`" if text else "must be given"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
