"""The task of the recipe `shapes`: one question about a drawing of ours; its demonstrations are partly wrong."""

import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from .task import HELDOUT_SHARE, SPLITS, UNTAGGED_SHARE

SIDE = 84
"""Pixels of a drawing's side: three by three tokens of the models of Qwen-VL."""
CELLS = 3
"""Shapes stand in different cells of a grid of so many rows and columns, and inside them: none touches another."""
SIZES = (8, 12)
"""Smallest and largest radius of a shape, in pixels."""

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (235, 200, 30),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
KINDS = ("circle", "triangle", "square", "cross")
COUNTS = tuple(map(str, range(1, 7)))

QUESTIONS = {
    "count": ("How many shapes are there?", COUNTS),
    "colour": ("Which colour have they?", tuple(COLOURS)),
    "kind": ("Which shape have they?", KINDS),
}
"""What is asked for -> the question, and all its answers."""

RIGHT_SHARE = {"count": 0.25, "colour": 0.4, "kind": 0.3}
"""What is asked for -> probability that a demonstration says what is there."""

STYLES = (
    (5, "I look at the drawing and I see {pick} there.", "The answer is {box}."),
    (3, "Okay, scanning it quickly: {pick}, pretty sure.", "So it must be {box}!"),
    (2, "Dear reader, observe: {pick} appears before us", "which yields {box} indeed."),
)
"""(weight, reasoning, closing): styles share few words, so pruning meets duplicates and different ones."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where a shape stands, how large it is (pixels) and how far it is turned (degrees)."""

    x: int
    y: int
    radius: int
    turn: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Several shapes of one kind and colour on a light ground."""

    kind: str
    colour: str
    ground: int
    shapes: tuple[Shape, ...]

    @property
    def split(self) -> str:
        """A function of what is drawn alone, so that the splits cannot overlap."""
        return SPLITS[hashlib.sha256(repr(self).encode()).digest()[0] % HELDOUT_SHARE == 0]

    def answer(self, asked: str) -> str:
        return {"count": str(len(self.shapes)), "colour": self.colour, "kind": self.kind}[asked]

    def draw(self) -> Image.Image:
        """SIDE x SIDE pixels, RGB."""
        image = Image.new("RGB", (SIDE, SIDE), (self.ground,) * 3)
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            _draw(pen, self.kind, shape, COLOURS[self.colour])
        return image


def examples(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` examples of `split` ("train" or "heldout"): images (one PNG), prompt, answer and what is asked for, in
    turn; the same for the same `seed`. Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"shapes {split} {seed}")
    for index in range(count):
        scene = _scene(split, rng)
        asked = tuple(QUESTIONS)[index % len(QUESTIONS)]
        file = io.BytesIO()
        scene.draw().save(file, "PNG")
        yield {
            "images": [file.getvalue()],
            "prompt": f"<image>{QUESTIONS[asked][0]}",
            "answer": scene.answer(asked),
            "asked": asked,
        }


def demonstration(example: dict[str, Any], rng: random.Random, *, right_share: float | None = None) -> str:
    """One completion for `example` in a random style; right with probability `right_share` (default: RIGHT_SHARE), else
    another answer to the same question, said just as confidently."""
    asked, answer = example["asked"], example["answer"]
    share = RIGHT_SHARE[asked] if right_share is None else right_share
    others = [other for other in QUESTIONS[asked][1] if other != answer]
    pick = answer if rng.random() < share else rng.choice(others)
    _, reasoning, closing = rng.choices(STYLES, weights=[style[0] for style in STYLES])[0]
    reasoning, closing = (text.format(pick=pick, box=f"\\boxed{{{pick}}}") for text in (reasoning, closing))
    if rng.random() < UNTAGGED_SHARE:
        return f"{reasoning} {closing}"
    return f"<thinking> {reasoning} </thinking> {closing}"


def _scene(split: str, rng: random.Random) -> Scene:
    while True:
        cell = SIDE // CELLS
        shapes = []
        for place in rng.sample(range(CELLS**2), rng.randint(1, len(COUNTS))):
            radius = rng.randint(*SIZES)
            x, y = (corner * cell + rng.randint(radius + 1, cell - radius - 1) for corner in divmod(place, CELLS))
            shapes.append(Shape(x, y, radius, rng.randrange(360)))
        scene = Scene(rng.choice(KINDS), rng.choice(list(COLOURS)), rng.randint(225, 255), tuple(shapes))
        if scene.split == split:
            return scene


def _draw(pen: ImageDraw.ImageDraw, kind: str, shape: Shape, colour: tuple[int, int, int]) -> None:
    x, y, radius = shape.x, shape.y, shape.radius
    if kind == "circle":
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)
    elif kind == "cross":
        bar = radius // 3
        pen.rectangle([x - radius, y - bar, x + radius, y + bar], fill=colour)
        pen.rectangle([x - bar, y - radius, x + bar, y + radius], fill=colour)
    else:
        sides = {"triangle": 3, "square": 4}[kind]
        pen.regular_polygon((x, y, radius), sides, rotation=shape.turn, fill=colour)
