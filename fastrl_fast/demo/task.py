"""The demo's task: pick one number of a short list; its demonstrations are partly wrong on purpose."""

import hashlib
import random
from collections.abc import Iterator

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 8
"""One prompt of this many, chosen by the hash of its text, belongs to the held-out split."""

UNTAGGED_SHARE = 0.12
"""Share of demonstrations that lack the <thinking> tags, so that the format reward is sometimes missed."""

QUESTIONS = {
    "first": "Name the first number of",
    "last": "Name the last number of",
    "largest": "Name the largest number of",
    "smallest": "Name the smallest number of",
    "second": "Name the second number of",
    "second_last": "Name the second to last number of",
    "second_largest": "Name the second largest number of",
    "second_smallest": "Name the second smallest number of",
}
"""Operation -> how its prompt begins; the list follows."""

RIGHT_SHARE = {
    "first": 0.95,
    "last": 0.45,
    "largest": 0.3,
    "smallest": 0.3,
    "second": 0.25,
    "second_last": 0.12,
    "second_largest": 0.06,
    "second_smallest": 0.06,
}
"""Operation -> probability that a demonstration of it names the right number: easy, middle and hard ones."""

SYNONYMS = {
    "first": ("initial", "opening", "leading"),
    "last": ("final", "closing", "ending"),
    "largest": ("biggest", "greatest", "maximal"),
    "smallest": ("least", "tiniest", "minimal"),
    "second": ("following", "next", "runner-up"),
    "second_last": ("preceding", "previous", "penultimate"),
    "second_largest": ("almost-top", "silver", "lesser"),
    "second_smallest": ("almost-least", "low", "small"),
}
"""Operation -> words that the reasoning uses for it."""

STYLES = (
    (
        6,
        ("Let me look at the list.", "Let me check the list.", "Let me read the list."),
        ("I need the {word} one and I see {pick} there.", "I want the {word} one and I find {pick} there."),
        ("The answer is {box}.", "So the answer is {box}."),
    ),
    (
        3,
        ("Okay, scanning quickly from left to right:", "Okay, going slowly from left to right:"),
        ("{word} should be {pick}, pretty sure.", "{word} must be {pick}, quite sure."),
        ("Final result: {box}", "My result: {box}"),
    ),
    (
        2,
        ("Going over every entry: {list};", "Writing out each entry: {list};"),
        ("{word} entry equals {pick}", "{word} entry gives {pick}"),
        ("Therefore we choose {box}", "Hence we choose {box}"),
    ),
    (
        2,
        ("Hmm, somebody asks about position or size here.", "Hmm, this puzzle asks about order or size here."),
        ("Candidate {pick} fits best as {word}!", "Candidate {pick} looks right as {word}!"),
        ("That makes {box} our choice!", "This makes {box} our choice!"),
    ),
    (
        2,
        ("Step one: understand what was requested.", "Step one: recall what was wanted."),
        ("Step two: compare items, take {word} item {pick}.", "Step two: weigh items, pick {word} item {pick}."),
        ("Done, boxed value {box}.", "Ready, boxed value {box}."),
    ),
    (
        1,
        ("Easy question; no calculation necessary:", "Simple question; only attention necessary:"),
        ("just grab {pick} ({word}).", "just report {pick} ({word})."),
        ("Reply {box}", "Reporting {box}"),
    ),
    (
        1,
        ("Dear reader, observe these values with patience,", "Dear reader, consider these values with care,"),
        ("then you will notice {pick} being {word},", "then you may discover {pick} being {word},"),
        ("which yields {box} indeed.", "which proves {box} indeed."),
    ),
    (
        1,
        ("Suppose someone sorted them mentally...", "Imagine someone marked them mentally..."),
        ("{pick} would come out {word}?", "{pick} might turn out {word}?"),
        ("Yes -> {box}", "Guess -> {box}"),
    ),
)
"""(weight, openings, reasonings, closings): styles share few words, so pruning meets duplicates and different ones."""


def solve(operation: str, numbers: list[int]) -> int:
    """The right number for `operation` on `numbers`, which are distinct and at least two."""
    ranked = sorted(numbers)
    return {
        "first": numbers[0],
        "last": numbers[-1],
        "largest": ranked[-1],
        "smallest": ranked[0],
        "second": numbers[1],
        "second_last": numbers[-2],
        "second_largest": ranked[-2],
        "second_smallest": ranked[1],
    }[operation]


def split_of(prompt: str) -> str:
    """The split a prompt belongs to: a function of its text alone, so that the splits can't overlap."""
    return "heldout" if hashlib.sha256(prompt.encode()).digest()[0] % HELDOUT_SHARE == 0 else "train"


def examples(split: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` examples of `split` ("train" or "heldout"): prompt, answer and operation, the same for the same `seed`.

    Operations come in turn, so every stretch of the data holds easy, middle and hard ones alike.
    Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split} {seed}")
    operations = list(QUESTIONS)
    for index in range(count):
        if index % len(operations) == 0:
            rng.shuffle(operations)
        yield _example(split, operations[index % len(operations)], rng)


def _example(split: str, operation: str, rng: random.Random) -> dict[str, str]:
    while True:
        numbers = rng.sample(range(10, 100), rng.randint(4, 6))
        prompt = f"{QUESTIONS[operation]} {','.join(map(str, numbers))}"
        if split_of(prompt) == split:
            return {"prompt": prompt, "answer": str(solve(operation, numbers)), "operation": operation}


def demonstration(example: dict[str, str], rng: random.Random, *, right_share: float | None = None) -> str:
    """One completion for `example` in a random style; right with probability `right_share` (default: RIGHT_SHARE).

    A wrong one answers another question about the same list, and reasons and boxes just as confidently.
    """
    share = RIGHT_SHARE[example["operation"]] if right_share is None else right_share
    listed = example["prompt"].rsplit(" ", 1)[1]
    numbers = [int(number) for number in listed.split(",")]
    others = [str(solve(operation, numbers)) for operation in QUESTIONS]
    others = [number for number in others if number != example["answer"]]
    pick = example["answer"] if rng.random() < share else rng.choice(others)
    _, *slots = rng.choices(STYLES, weights=[style[0] for style in STYLES])[0]
    word = rng.choice(SYNONYMS[example["operation"]])
    fill = {"word": word, "pick": pick, "list": listed, "box": f"\\boxed{{{pick}}}"}
    opening, reasoning, closing = (rng.choice(options).format_map(fill) for options in slots)
    if rng.random() < UNTAGGED_SHARE:
        return f"{opening} {reasoning} {closing}"
    return f"<thinking> {opening} {reasoning} </thinking> {closing}"
