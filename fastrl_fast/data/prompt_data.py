"""Rows as prompts, and the order in which a run visits them."""

import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import DataConfig
from ..types import ImageReader, Picture, Prompt, UnfitImage
from .pictures import IMAGE_COLUMNS, image_files, with_placeholders
from .sources import Row, load_rows
from .template import Message, PromptTemplate

_PROMPT_COLUMNS = ("prompt", "problem", "question")
_NAMED = 5
_ANSWER_COLUMNS = ("answer", "solution", "ground_truth")


class PromptData:
    """The prompts of a data set, and a cursor that hands out each of them once per epoch.

    A row's question becomes `token_ids`, its answer the text `columns["answer"]`, the rest `columns` as they are.
    Prompts longer than max_prompt_tokens are left out and counted in `dropped_overlong`, rows with a damaged image in
    `dropped_unreadable`, with a warning; more than half of them are an error. `answer_column` is the name of the answer
    in the data, None without one. The order of an epoch is a function of (seed, epoch). `section` names the settings in
    messages: "data" or "eval". `images` is the model's reader, without which no row may have an image. Raises
    ValueError for what is wrong with the data, naming the row and the column.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        section: str = "data",
        images: ImageReader | None = None,
    ) -> None:
        self._config = config
        self._seed = seed
        self._path_field = f"{section}.path"
        self._images = images
        self.answer_column: str | None = None
        template = PromptTemplate(config, tokenizer)
        self.dropped_unreadable = 0
        rows = load_rows(config.path, config.split, field=self._path_field)
        prompts = self._prompts(rows, template)
        self._kept = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_tokens]
        self.dropped_overlong = len(prompts) - len(self._kept)
        if not self._kept:
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise ValueError(
                f"data.max_prompt_tokens must be at least {shortest}, the shortest prompt of {config.path}, "
                f"got {config.max_prompt_tokens}"
            )
        if config.prompts_per_step > len(self._kept):
            raise ValueError(
                f"data.prompts_per_step must be at most {len(self._kept)}, the prompts in {config.path}"
                f"{f' ({self.dropped_overlong} too long)' if self.dropped_overlong else ''}, "
                f"got {config.prompts_per_step}"
            )
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._kept)

    def first(self, count: int) -> list[Prompt]:
        """The first `count` prompts as the data has them, or all if there are fewer; the cursor stays."""
        return self._kept[:count]

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts, over the border of epochs."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + count - len(taken)]
            taken += [self._kept[place] for place in part]
            self._position += len(part)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor stands, and in which data."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; with other data, warns and starts at the beginning."""
        if state["fingerprint"] != self._fingerprint:
            warnings.warn(
                f"{self._path_field}: {self._config.path} is not the data of the checkpoint: starting at its beginning",
                stacklevel=2,
            )
            state = {"epoch": 0, "position": 0}
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self._kept:
            digest.update(f"{prompt.id}\0{prompt.text}\0".encode())
        return digest.hexdigest()

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._kept)))
        if self._config.shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order

    def _prompts(self, rows: list[Row], template: PromptTemplate) -> list[Prompt]:
        found = list(dict.fromkeys(name for row in rows for name in row))
        question = self._column("prompt_column", self._config.prompt_column, _PROMPT_COLUMNS, found)
        if question is None:
            raise ValueError(
                f"data.prompt_column must name the column with the question, as none of {', '.join(_PROMPT_COLUMNS)} "
                f"is there; {self._config.path} has {', '.join(found)}"
            )
        answer = self._column("answer_column", self._config.answer_column, _ANSWER_COLUMNS, found)
        self.answer_column = answer
        image = self._column("image_column", self._config.image_column, IMAGE_COLUMNS, found)
        texts, rendered, columns, files = [], [], [], []
        for number, row in enumerate(rows, 1):
            files.append(self._image_files(row, number, image))
            with self._row(number, question):
                asked = _question(row.get(question))
                texts.append(asked)
                if image is not None and self._images is not None:
                    asked = with_placeholders(asked, len(files[-1]), self._images.placeholder)
                rendered.append(template.render(asked))
                rendered[-1].encode("utf-8")  # half a surrogate pair: tokenizers raise an error that names no row
            columns.append({name: row.get(name) for name in found if name not in (question, image)})
            if answer is not None:
                columns[-1]["answer"] = self._answer(row.get(answer), number, answer)
        prompts: list[Prompt] = []
        unfit: list[str] = []
        encoded = zip(_row_ids(rows), template.encode(rendered), texts, columns, files, strict=True)
        for number, (name, tokens, text, rest, held) in enumerate(encoded, 1):
            pictures: tuple[Picture, ...] = ()
            if self._images is not None:
                try:
                    with self._row(number, image or question):
                        tokens, pictures = self._images.place(tokens, held)
                except ValueError as error:
                    if not isinstance(error.__cause__, UnfitImage):
                        raise
                    unfit.append(f"{error} (id {name})")
                    continue
            prompts.append(Prompt(id=name, token_ids=tokens, text=text, columns=rest, pictures=pictures))
        self._leave_out(unfit, len(rows))
        return prompts

    def _leave_out(self, unfit: list[str], rows: int) -> None:
        """Say which rows have an image that cannot be read; where most have one, something else is wrong."""
        self.dropped_unreadable = len(unfit)
        if 2 * len(unfit) > rows:
            raise ValueError(f"{unfit[0]}; so are {len(unfit)} of {rows} rows")
        if unfit:
            some = "; ".join(unfit[:_NAMED]) + ("; ..." if len(unfit) > _NAMED else "")
            warnings.warn(f"{len(unfit)} of {rows} rows are left out: {some}", stacklevel=2)

    def _image_files(self, row: Row, number: int, column: str | None) -> list[bytes]:
        if column is None:
            return []
        folder = Path(self._config.image_dir or Path(self._config.path).expanduser().parent).expanduser()
        with self._row(number, column):
            files = image_files(row.get(column), folder)
            if files and self._images is None:
                raise ValueError("holds images, which the model at model.path does not read: those of Qwen-VL do")
        return files

    @contextmanager
    def _row(self, number: int, column: str) -> Iterator[None]:
        """Name the row and the column of a ValueError raised inside."""
        try:
            yield
        except ValueError as error:
            where = f"{self._path_field}: row {number} of {self._config.path}"
            raise ValueError(f"{where}: column {column!r} {error}") from error

    def _column(self, setting: str, wanted: str | None, usual: tuple[str, ...], found: list[str]) -> str | None:
        if wanted is not None and wanted not in found:
            raise ValueError(f"data.{setting} must be one of {', '.join(found)} in {self._config.path}, got {wanted!r}")
        return wanted if wanted is not None else next((name for name in usual if name in found), None)

    def _answer(self, value: object, number: int, column: str) -> str | None:
        """The answer as text, None where there is none."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, float) and value != value:  # how some writers say null
            return None
        if isinstance(value, (bool, int, float, Decimal)):
            return str(value)
        raise ValueError(
            f"data.answer_column: row {number} of {self._config.path}: column {column!r} must be text or a number, "
            f"got {type(value).__name__} {value!r:.60}"
        )


def _question(value: object) -> str | list[Message]:
    """The question as a string or list of messages; ValueError where it is neither."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"must be text or a list of messages with role and content, got {message!r:.60}")
            if not isinstance(message["content"], str):
                raise ValueError(f"must hold messages of text, got {message['content']!r:.60}")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    if value is None or value == "" or value == [] or isinstance(value, str):
        raise ValueError("is empty")
    raise ValueError(f"must be text or a list of messages with role and content, got {value!r:.60}")


def _row_ids(rows: list[Row]) -> list[str]:
    """The column `id` where it names every row differently, else a hash of the row's content and its occurrence."""
    # Half a surrogate pair has no UTF-8, which the fingerprint and files need.
    given = [str(row["id"]).encode("utf-8", "backslashreplace").decode() for row in rows if row.get("id") is not None]
    if len(set(given)) == len(rows):
        return given
    seen: Counter[str] = Counter()
    ids = []
    for row in rows:
        content = json.dumps(row, sort_keys=True, default=_stable)
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        ids.append(f"{digest}-{seen[digest]}" if seen[digest] else digest)
        seen[digest] += 1
    return ids


def _stable(value: Any) -> str:
    """A text for what json has no word for; the repr of a PIL image holds its address in memory."""
    return hashlib.blake2b(value.tobytes()).hexdigest() if hasattr(value, "getexif") else str(value)
