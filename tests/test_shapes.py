"""The drawings show what they are said to show, and the shipped model that looks at them is as weak as it should be."""

import io
import os
import random
import re
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from PIL import Image

from fastrl_fast import cli
from fastrl_fast.accuracy import build_grader
from fastrl_fast.data import load_rows
from fastrl_fast.demo import SHAPES_MODEL_DIR
from fastrl_fast.demo.pretrain_shapes import sampled_accuracy
from fastrl_fast.demo.shapes import COLOURS, QUESTIONS, RIGHT_SHARE, demonstration, examples
from fastrl_fast.demo.task import UNTAGGED_SHARE
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Trainer


def pixels(row: dict) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Where the drawing is not its ground."""
    image = Image.open(io.BytesIO(row["images"][0])).convert("RGB")
    every = {(x, y): image.getpixel((x, y)) for x in range(image.width) for y in range(image.height)}
    ground = Counter(every.values()).most_common(1)[0][0]
    return {place: colour for place, colour in every.items() if colour != ground}


def pieces(places: set[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    """Pixels that hang together, by their eight neighbours."""
    found = []
    while places:
        piece, border = set(), [places.pop()]
        while border:
            x, y = border.pop()
            piece.add((x, y))
            near = {(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & places
            places -= near
            border += near
        found.append(piece)
    return found


FILLED = {"circle": (0.74, 0.85), "triangle": (0.3, 0.62), "square": (0.45, 1.0), "cross": (0.42, 0.62)}
"""Share of its bounding box that a shape fills."""


def test_answers_are_what_the_pixels_say() -> None:
    for row in examples("train", 120, 1):
        inked = pixels(row)
        shapes = pieces(set(inked))
        if row["asked"] == "count":
            assert row["answer"] == str(len(shapes))
        elif row["asked"] == "colour":
            assert set(inked.values()) == {COLOURS[row["answer"]]}
        else:
            for shape in shapes:
                width, height = (max(side) - min(side) + 1 for side in zip(*shape, strict=True))
                low, high = FILLED[row["answer"]]
                assert low <= len(shape) / (width * height) <= high, row["answer"]


def test_splits_never_share_a_drawing() -> None:
    train = {row["images"][0] for seed in range(2) for row in examples("train", 600, seed)}
    heldout = {row["images"][0] for seed in range(2) for row in examples("heldout", 600, seed)}
    assert not train & heldout and len(train) == len(heldout) == 1200
    with pytest.raises(ValueError, match=r"split must be one of .*'test'"):
        next(examples("test", 1, 0))


@pytest.mark.parametrize("asked", list(QUESTIONS))
def test_demonstrations_are_right_as_often_as_declared(asked: str) -> None:
    rng = random.Random(asked)
    row = next(row for row in examples("train", 3, 2) if row["asked"] == asked)
    right = tagged = 0
    for _ in range(4000):
        text = demonstration(row, rng)
        (boxed,) = re.findall(r"\\boxed\{(\w+)\}", text)
        assert boxed in QUESTIONS[asked][1] and text.count(boxed) == 2
        right += boxed == row["answer"]
        tagged += bool(re.fullmatch(r"<thinking>.*</thinking>.*", text))
    for count, share in ((right, RIGHT_SHARE[asked]), (tagged, 1 - UNTAGGED_SHARE)):
        assert abs(count / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    for share in (0.0, 1.0):
        assert (f"\\boxed{{{row['answer']}}}" in demonstration(row, rng, right_share=share)) == bool(share)


def test_rows_are_read_by_name() -> None:
    rows = load_rows("shapes:heldout?size=6&seed=3", "train")
    assert rows == list(examples("heldout", 6, 3))
    with pytest.raises(ValueError, match=r"data\.path: shapes: must be followed by one of train, heldout, got 'test'"):
        load_rows("shapes:test", "train")
    assert cli.parse(["--config", "shapes"], prog="train")[0].model.path == "builtin:shapes"


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in SHAPES_MODEL_DIR.iterdir()) <= 1_500_000


def test_base_model_is_right_in_20_to_45_percent_because_of_what_it_was_shown() -> None:
    accuracy = sampled_accuracy(SHAPES_MODEL_DIR, 384, 11)
    assert 0.20 <= accuracy["all"] <= 0.45, accuracy


def test_training_raises_the_share_of_right_answers(process_group: torch.device, tmp_path: Path) -> None:
    """Half of the recipe's steps: from about a quarter to about a half."""
    arguments = ["--config=shapes", "--data.path=shapes:train?size=400", "--eval.path=null", "--reward.workers=1"]
    config, _ = cli.parse(arguments, prog="train")
    with build_grader(config.reward) as grader:
        inputs = load_inputs(config, grader)
        parts = build_parts(config, inputs, grader, process_group, folder=tmp_path, log=None)
        trainer = Trainer(config, parts, total_steps=30)
        right = [trainer.step()["reward/exact"] for _ in range(30)]
    assert sum(right[-5:]) / 5 > sum(right[:5]) / 5 + 0.1, right
