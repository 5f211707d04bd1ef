"""Grades random answers without end: `python -m tests.fuzz.answers --seconds 600 [--seed 0]`.

Every answer must be graded within SLOW seconds of the processor, as 1, 0 or None, without a fault of a library that is
caught, and below MEMORY in all.
"""

import random
import re
import sys
import time

from fastrl_fast.rewards import exact_reward, faults, format_reward, math_reward, number_reward
from tests.fuzz import peak_bytes

SLOW, MEMORY = 5.0, 1 << 30
WORDS = r"""
\frac \dfrac12 \sqrt \boxed \fbox \text \mathrm \left( \right) \infty \pi \pm \cdot \times ^\circ \%
\{ \} \begin{pmatrix} \end{pmatrix} \\ & \cup \cap \in \mathbb{R} \log \sin \binom \overline \int
\sum \lim \le \ge \neq \approx \cfrac { } ( ) [ ] < > = + - * / ^ _ ! , . ; : ' \" $ $$ % # @ | ~ °
− × ÷ √ π ∞ ½ ² ≤ ∪ ４２ 答案 № ١٢ ﷽ é 𝟙 ­ 0 1 2 3 7 9 10 12 100 1,234 1e9 1e1000000000 9^9^9
10^{10^{10}} (10^{10})! 0.1 .5 5. 007 1/3 2 1/2 x y n e i A B E cm km/h degrees dollars and or the
answer is **Final Answer** #### <answer> </answer> <think> </think> None nan inf True import exec
lambda __class__
"""
PIECES = re.findall(r"\S+", WORDS)
GLUE = ("", "", "", " ", "\n", "{", "}", "^{", "_{", r"\\")


def text(draw: random.Random) -> str:
    """Pieces of LaTeX, digits and words in any order, sometimes nested, repeated, cut or of raw code points."""
    kind = draw.random()
    if kind < 0.05:
        return "".join(chr(draw.randrange(draw.choice((128, 0x3000, 0x110000)))) for _ in range(30))
    body = "".join(draw.choice(PIECES) + draw.choice(GLUE) for _ in range(draw.choice((1, 2, 3, 5, 8, 13, 40))))
    if kind < 0.15:
        opening = draw.choice(("{", "(", r"\frac{", r"\sqrt{", "2^{", "-", "1+", r"\boxed{"))
        body = opening * draw.choice((10, 300, 5000)) + body
    if kind < 0.2:
        body *= draw.choice((10, 200))
    if kind < 0.6:
        body = rf"so \boxed{{{body}}}"
    body = body[:100_000]  # more than a completion ever holds
    return body[: draw.randrange(1, len(body) + 1)] if kind > 0.95 else body


def run(seconds: float, seed: int) -> dict[str, float]:
    """Raises AssertionError with the texts that broke a rule."""
    draw, end, count, slowest = random.Random(seed), time.monotonic() + seconds, 0, 0.0
    math_reward(["p"], [r"\boxed{1}"], answer=["1"])  # imports
    faults.take_count()
    while time.monotonic() < end:
        gold, answer = text(draw), text(draw)
        if draw.random() < 0.3:
            answer = rf"\boxed{{{gold}}}"
        for reward in (math_reward, exact_reward, number_reward, format_reward):
            started = time.process_time()
            (value,) = reward(["p"], [answer], answer=[gold])
            spent = time.process_time() - started
            slowest = max(slowest, spent)
            assert value in (0.0, 1.0, None), (reward, value, gold, answer)
            assert spent < SLOW, (reward, spent, gold, answer)
        assert not faults.take_count(), ("a fault of the library", gold, answer)
        count += 1
    peak = peak_bytes()
    assert peak < MEMORY, f"{peak / 1e6:.0f} MB"
    return {"answers": count, "slowest seconds": round(slowest, 3), "peak MB": round(peak / 1e6)}


def main(argv: list[str], work: object = run) -> None:
    options = dict(zip(argv[::2], argv[1::2], strict=True))
    print(work(float(options.get("--seconds", 600)), int(options.get("--seed", 0))), flush=True)  # type: ignore[operator]


if __name__ == "__main__":
    main(sys.argv[1:])
