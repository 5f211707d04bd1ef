"""The events of torch's profiler as rows: the time that each operator took itself, by phase, its FLOPs and bytes."""

import gzip
import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastrl_fast.metrics import PHASES

BETWEEN = "(between operators)"
"""Time of a phase that no operator took: Python, the grader, waiting."""
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "bool": 1}
VIEWS = (
    "as_strided", "select", "slice", "view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "t", "permute",
)  # fmt: skip
"""Operators that read none of what they are given."""
HEAD_GEMMS = {"fastrl_fast::packed_logprobs": 1, "fastrl_fast::fused_policy_loss": 3}
"""Products of [targets, hidden] and [hidden, vocabulary] that an operator of the head makes; more where it makes one
twice."""


@dataclass(slots=True)
class Row:
    """What was done under one name in one phase."""

    phase: str
    name: str
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def record(self) -> dict[str, Any]:
        return asdict(self)


def read_trace(path: Path) -> list[Row]:
    """Rows of a Chrome trace: where there are kernels these, under the operator that launched them, else operators.

    Raises ValueError where it is none.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of torch's profiler: {error}") from error
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    _take_children_off(operators)
    rows: dict[tuple[str, str], Row] = {}
    places = _Phases(phases)
    for event in operators:
        phase = places.at(event["ts"])
        row = rows.setdefault((phase, event["name"]), Row(phase, event["name"]))
        row.calls += 1
        row.seconds += 0.0 if kernels else event["own"] * 1e-6
        row.flops += _flops(event)
        row.bytes += _bytes(event)
    if kernels:
        _add_kernels(rows, operators, kernels, places)
    else:
        _add_between(rows, phases)
    return [row for row in rows.values() if row.seconds > 0]


class _Phases:
    """Which phase a time falls into; phases of a step come one after the other."""

    def __init__(self, phases: list[dict[str, Any]]) -> None:
        self.phases = sorted(phases, key=lambda event: event["ts"])
        self.starts = [event["ts"] for event in self.phases]

    def at(self, time: float) -> str:
        index = bisect_right(self.starts, time) - 1
        inside = index >= 0 and time <= self.starts[index] + self.phases[index]["dur"]
        return self.phases[index]["name"] if inside else ""


def _take_children_off(operators: list[dict[str, Any]]) -> None:
    """Set `own` of each event: its time without that of the operators that it called on its thread."""
    operators.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    open_events: list[dict[str, Any]] = []
    for event in operators:
        event["own"] = event["dur"]
        while open_events and not _contains(open_events[-1], event):
            open_events.pop()
        if open_events:
            open_events[-1]["own"] -= event["dur"]
        open_events.append(event)


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer["tid"] == inner["tid"] and inner["ts"] < outer["ts"] + outer["dur"]


def _add_kernels(
    rows: dict[tuple[str, str], Row], operators: list[dict[str, Any]], kernels: list[dict[str, Any]], places: _Phases
) -> None:
    """Give each operator the time of the kernels that it launched; a kernel without one stands for itself."""
    launchers = {e["args"]["External id"]: e for e in operators if "External id" in e.get("args", {})}
    for kernel in kernels:
        launcher = launchers.get(kernel.get("args", {}).get("External id"))
        phase = places.at(launcher["ts"] if launcher else kernel["ts"])
        name = launcher["name"] if launcher else kernel["name"]
        row = rows.setdefault((phase, name), Row(phase, name))
        row.calls += launcher is None
        row.seconds += kernel["dur"] * 1e-6


def _add_between(rows: dict[tuple[str, str], Row], phases: list[dict[str, Any]]) -> None:
    for event in phases:
        row = rows.setdefault((event["name"], BETWEEN), Row(event["name"], BETWEEN))
        row.calls += 1
        row.seconds += event["dur"] * 1e-6
    for (phase, name), row in rows.items():
        if phase and name != BETWEEN:
            rows[phase, BETWEEN].seconds -= row.seconds


def _flops(event: dict[str, Any]) -> float:
    """Of matrix products, attention and the head; 0 for what moves more than it computes."""
    name, shapes = event["name"], event.get("args", {}).get("Input Dims", [])
    if name in ("aten::mm", "aten::bmm"):
        return 2.0 * math.prod(shapes[0]) * shapes[1][-1]
    if name in ("aten::addmm", "aten::addmm_", "aten::baddbmm"):
        return 2.0 * math.prod(shapes[1]) * shapes[2][-1]
    if name.startswith("aten::_scaled_dot_product"):
        # Its backward pass comes with the output's gradient in front and makes five products instead of two.
        backward = "backward" in name
        query, key = shapes[1:3] if backward else shapes[:2]
        return (5 if backward else 2) * 2.0 * math.prod(query) * key[-2]
    if name in HEAD_GEMMS:
        hidden, weight, targets = shapes[:3]
        return HEAD_GEMMS[name] * 2.0 * targets[0] * hidden[-1] * weight[0]
    return 0.0


def _bytes(event: dict[str, Any]) -> float:
    """Every input once, and the output of a matrix product."""
    arguments, name = event.get("args", {}), event["name"]
    if name.removeprefix("aten::") in VIEWS:
        return 0.0
    shapes, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    total = sum(math.prod(s) * SIZES.get(t, 0) for s, t in zip(shapes, types, strict=True) if s and _flat(s))
    if name in ("aten::mm", "aten::bmm"):
        total += math.prod(shapes[0][:-1]) * shapes[1][-1] * SIZES.get(types[0], 0)
    return float(total)


def _flat(shape: list[Any]) -> bool:
    """Whether it is a tensor's shape; a list of tensors has a list of shapes."""
    return all(isinstance(size, int) for size in shape)
