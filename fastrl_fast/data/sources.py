"""Rows from wherever a path points: files, `datasets` folders, hub ids, reasoning_gym tasks and the demo's own data."""

import csv
import dataclasses
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..demo import shapes, task
from ..demo.task import SPLITS

Row = dict[str, Any]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_FILE_NAME = re.compile(r"\.[A-Za-z]{2,}$")
_DRAWN = {"demo": task.examples, "shapes": shapes.examples}
_DRAWN_SIZES = {"train": 4096, "heldout": 256}


def load_rows(path: str, split: str, *, field: str = "data.path") -> list[Row]:
    """The rows of `split` of the data at `path`, in order.

    `path` is a .jsonl, .json, .csv or .parquet file (the first three also .gz), a folder (saved by `datasets`, or of
    data files), `reasoning_gym:TASK?key=value`, `demo:train` or `demo:heldout` (`?size=256&seed=0`), `shapes:` with the
    same, or a hub id, with `:CONFIGURATION` where it has several. Nothing that looks like a file is ever asked for on
    the hub.
    Raises ValueError naming `field` for anything that is missing, unreadable or empty.
    """
    scheme, _, rest = path.partition(":")
    try:
        if scheme in _DRAWN:
            rows = _drawn(scheme, rest)
        elif scheme == "reasoning_gym":
            rows = _reasoning_gym(rest)
        else:
            rows = _located(path, split)
    except _SourceError as error:
        raise ValueError(f"{field}: {error}") from error.__cause__
    if not rows:
        raise ValueError(f"{field}: no rows in {path}")
    return rows


class _SourceError(Exception):
    """What is wrong with a source, without the name of the setting."""


def _located(path: str, split: str) -> list[Row]:
    location = Path(path).expanduser()
    if location.is_dir():
        return _folder(location, split)
    if location.is_file():
        return _file(location)
    if _FILE_NAME.search(path):
        raise _SourceError(f"no such file {path}")
    first, *others = path.split("/")
    if not _HUB_ID.fullmatch(path) or (others and (first in (".", "..", "~") or Path(first).is_dir())):
        raise _SourceError(f"no such file or folder {path}")
    return _hub(path, split)


def _file(path: Path) -> list[Row]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if kind not in _READERS or (packed and kind == ".parquet"):
        raise _SourceError(f"{path} must end in {', '.join(_READERS)} or, but for .parquet, one of these and .gz")
    try:
        rows = _READERS[kind](path)
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise _SourceError(f"can't read {path}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _SourceError(f"row {number} of {path} must be an object with named columns, got {row!r:.60}")
    return rows


def _text(path: Path) -> str:
    """The file as text; a byte order mark, as some editors write, goes."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode("utf-8-sig")


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    # not splitlines(), which also splits at U+2028 and the like inside a json string
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, or deep nesting
                raise _SourceError(f"line {number} of {path} is not json: {error}") from error
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # one object after the other: jsonl under the other name
            return _read_jsonl(path)
        raise _SourceError(f"{path} is not json: {error}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == len(content) == 1 else [content]
    if not isinstance(content, list):
        raise _SourceError(f"{path} must hold a list of objects, got {type(content).__name__}")
    return content


def _read_csv(path: Path) -> list[Row]:
    """Every value stays the text it is ("007", "NA"); an empty one is None."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows: list[Row] = []
    try:
        reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise _SourceError(f"the columns of {path} must have different names, got {', '.join(names)}")
        for row in reader:
            if None in row or None in row.values():
                raise _SourceError(f"row {len(rows) + 1} of {path} must have as many values as the header has names")
            rows.append({name: value or None for name, value in row.items()})
    except csv.Error as error:
        raise _SourceError(f"row {len(rows) + 1} of {path} is not csv: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read().to_pylist()
    except pa.ArrowException as error:
        raise _SourceError(f"can't read {path}: {_first_line(error)}") from error


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _folder(path: Path, split: str) -> list[Row]:
    import datasets

    try:
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path)).to_list()
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if split not in splits:
                raise _SourceError(f"{path} has no split {split!r}; it has {', '.join(splits)}")
            return splits[split].to_list()
        if not any(path.iterdir()):
            raise _SourceError(f"the folder {path} is empty")
        return datasets.load_dataset(str(path), split=split).to_list()
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _SourceError(f"can't load split {split!r} of the folder {path}: {_first_line(error)}") from error


def _hub(path: str, split: str) -> list[Row]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split).to_list()
    except Exception as error:  # whatever the hub, the network and the loader may raise
        raise _SourceError(f"can't load split {split!r} of hub id {path}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _options(text: str) -> tuple[str, dict[str, Any]]:
    """NAME?key=value&key=value: values are json where they read as such, else text."""
    name, _, query = text.partition("?")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return name, options


def _whole_number(options: dict[str, Any], key: str, default: int) -> int:
    value = options.pop(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _SourceError(f"{key} must be a whole number of 0 or more, got {value!r}")
    return value


def _drawn(scheme: str, text: str) -> list[Row]:
    """Rows of our own tasks, drawn by lot."""
    split, options = _options(text)
    if split not in SPLITS:
        raise _SourceError(f"{scheme}: must be followed by one of {', '.join(SPLITS)}, got {split!r}")
    size = _whole_number(options, "size", _DRAWN_SIZES[split])
    seed = _whole_number(options, "seed", 0)
    if options:
        raise _SourceError(f"{scheme}:{split} takes size and seed, got {', '.join(options)}")
    return list(_DRAWN[scheme](split, size, seed))


def _reasoning_gym(text: str) -> list[Row]:
    """Columns question, answer, rg_dataset and rg_entry, the json that the `reasoning_gym` reward needs."""
    task, options = _options(text)
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise _SourceError("reasoning_gym: needs pip install 'fastrl_fast[reasoning-gym]'") from error
    size, seed = _whole_number(options, "size", 500), _whole_number(options, "seed", 0)
    if task in DATASETS:
        options = _as_ranges(options, {field.name for field in dataclasses.fields(DATASETS[task][1])})
    try:
        entries: Iterable[Row] = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise _SourceError(f"reasoning_gym:{text}: {_first_line(error)}") from error
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "rg_dataset": task,
            "rg_entry": json.dumps(entry, default=str),
        }
        for entry in entries
    ]


def _as_ranges(options: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """Options of a task, with num_terms=2 (or terms=2) read as min_terms=2 and max_terms=2 where it takes a range."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        noun = name.removeprefix("num_")
        ends = (f"min_{noun}", f"max_{noun}")
        names = ends if name not in fields and fields.issuperset(ends) else (name,)
        known |= dict.fromkeys(names, value)
    return known
