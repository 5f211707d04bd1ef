"""Who may import whom: the table of the design's section 3, held against every import statement."""

import ast
import re
import sys
from pathlib import Path

import pytest

import fastrl_fast

PACKAGE = Path(fastrl_fast.__file__).parent
KERNELS = Path(__file__).parents[1] / "csrc" / "kernels"

RANKS = {
    0: [
        "config",
        "types",
        "rules",
        "foreign_names",
        "loss_config",
        "data_config",
        "method_config",
        "rollout_config",
        "draws",
        "drop_reasons",
        "file_modes",
        "missing",
        "orphans",
    ],
    1: ["ops"],
    2: [
        "advantage",
        "arrays",
        "prune",
        "budget",
        "layers",
        "packing",
        "microbatches",
        "loss",
        "memory",
        "optimizer",
        "plain_yaml",
        "positions",
        "rewards",
        "tower",
        "demo",
    ],
    3: [
        "data",
        "builtin",
        "model",
        "vision",
        "head",
        "rollout",
        "distributed",
        "checkpoint",
        "attention",
        "metrics",
        "profiling",
        "run_folder",
        "step_report",
        "alarms",
        "tables",
        "savings",
        "cli",
    ],
    4: [
        "accuracy",
        "collect",
        "grading",
        "integrations.packed_forward",
        "interrupt",
        "plan",
        "dry_run",
        "parity",
        "report",
        "saved_rollouts",
        "schedule",
        "sharing_check",
        "trainer",
        "training_run",
    ],
    5: ["train", "evaluate", "export", "console", "doctor", "demo.pretrain", "demo.pretrain_shapes", "integrations"],
}
"""Modules by rank, by the longest name that fits; a module may import what is below it."""

SAME_RANK = {0: RANKS[0], 2: RANKS[2], 3: ["attention", "distributed", "metrics", "vision", "head"], 4: RANKS[4]}
"""What modules may import at their own rank, besides their own package."""

ONLY_IN = {
    "vllm": ["rollout.vllm_cpu", "rollout.vllm_engine", "rollout.weight_transfer"],
    "httpx2": ["rollout.server_pool"],
    "trl": ["integrations.trl"],
    "flash_attn": ["ops.packed_attention", "ops.varlen_attention"],
    "flash_attn_interface": ["ops.varlen_attention"],
    "_fastrl_fast": ["ops._lib"],
}
"""Libraries that one module alone may import."""

NEVER = {
    0: ["transformers", "torch.distributed", "datasets", "vllm"],
    1: ["transformers", "torch.distributed", "datasets", "vllm"],
    2: ["transformers", "torch.distributed", "datasets", "vllm"],
}
"""Libraries that a rank may not import, not even inside a function."""

PURE = ["advantage", "prune", "budget", "packing", "microbatches", "positions", "loss", "memory", "optimizer"]
UNCLEAN = [
    "os",
    "io",
    "pathlib",
    "shutil",
    "tempfile",
    "time",
    "datetime",
    "subprocess",
    "threading",
    "random",
    "socket",
]
"""Deciding modules touch no file, no clock, no process and no hidden state."""

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def entry(module: str) -> str | None:
    """The table's longest name that the module is or lies in."""
    names = [name for row in RANKS.values() for name in row]
    return max((n for n in names if f"{module}.".startswith(f"{n}.")), key=len, default=None)


def rank(module: str) -> int:
    return next(r for r, row in RANKS.items() if entry(module) in row)


def imports(path: Path, package: str) -> set[str]:
    """Absolute names of everything imported in a file, also inside functions; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    name = f"fastrl_fast.{module}"
    return imports(path, name if path.name == "__init__.py" else name.rpartition(".")[0])


def own_imports(module: str) -> set[str]:
    """Modules of this package that a module imports."""
    ours = {name.removeprefix("fastrl_fast.") for name in imports_of(module) if name.startswith("fastrl_fast.")}
    return {name for name in ours if name in MODULES}


def within(name: str, library: str) -> bool:
    return f"{name}.".startswith(f"{library}.")


def test_every_module_is_in_the_table_and_the_table_names_no_other():
    assert not [module for module in MODULES if entry(module) is None]
    assert not [name for row in RANKS.values() for name in row if name not in MODULES]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for other in own_imports(module):
        same_package = entry(other) == entry(module)
        peer = rank(other) == rank(module) and entry(other) in SAME_RANK.get(rank(module), [])
        assert same_package or peer or rank(other) < rank(module), f"{module} imports {other}"
        assert rank(other) < 5, f"{module} imports {other}, which is a command"


@pytest.mark.parametrize("module", MODULES)
def test_libraries_stay_where_they_belong(module):
    for name in imports_of(module):
        for library, homes in ONLY_IN.items():
            assert not within(name, library) or module in homes, f"{module} imports {library}"
        for library in NEVER.get(rank(module), []):
            assert not within(name, library), f"{module} of rank {rank(module)} imports {name}"
        if module in PURE:
            assert name.split(".")[0] not in UNCLEAN, f"{module} imports {name}"


def test_rank_0_needs_the_standard_library_and_torch_alone():
    allowed = {*sys.stdlib_module_names, "torch"}
    for module in RANKS[0]:
        names = {name for name in imports_of(module) if not name.startswith("fastrl_fast.")}
        assert {name.split(".")[0] for name in names} <= allowed, module


def test_the_reader_of_imports_sees_every_form(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import torch.distributed as dist\nfrom . import cli\nfrom ..ops import x as y\nfrom .ops.z import w\n"
        "def f():\n    import vllm\n    from fastrl_fast.train import main\n"
    )
    found = imports(path, "fastrl_fast.rollout")
    assert found >= {"torch.distributed", "fastrl_fast.rollout.cli", "fastrl_fast.ops.x", "fastrl_fast.rollout.ops.z"}
    assert found >= {"vllm", "fastrl_fast.train.main", "fastrl_fast.train"}
    assert "flash_attn" in imports_of("ops.packed_attention") and "config" in own_imports("cli")


@pytest.mark.skipif(not KERNELS.is_dir(), reason="the C++ sources are not beside these tests")
def test_kernels_include_the_standard_library_cuda_and_themselves():
    files = [path for path in KERNELS.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert files
    for path in files:
        for system, own in re.findall(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', path.read_text(), re.MULTILINE):
            if own:
                assert (KERNELS.parent / own).is_file() and own.startswith("kernels/"), f"{path.name} includes {own}"
            elif "/" in system or "." in system:
                # A header of the C++ standard library has neither a folder nor a suffix; intrinsics are the compiler's.
                cuda = system.startswith(("cuda", "cub/", "cooperative_groups", "mma.h")) and "cuda" in path.parts
                assert cuda or system == "immintrin.h", f"{path.name} includes {system}"
