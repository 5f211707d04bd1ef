"""Attention of a whole row in one pass against float64 and torch's own, at the borders of its blocks and tiles."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import run_with, run_with_scalar_code
from test_prefix_attention import gradients, inputs, laid_out, textbook
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastrl_fast.ops._lib import kernels
from fastrl_fast.ops.row_attention import has_row_kernel, row_attention, row_pieces

HAS_CODE = pytest.mark.skipif(not kernels.ROW_ATTENTION_MULTIPLE, reason="this processor has no AVX2")
LENGTHS = [1, 5, 6, 7, 11, 12, 13, 16, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 128, 129, 193]
"""Around tiles of 6 and 12 queries, panels of 16 and 32 keys, blocks of 48 queries and 64 keys."""


def run(leaves: list[Tensor], layout, scale: float) -> Tensor:
    """[1, T, heads, D] of inputs [1, heads, T, D], as the textbook has it."""
    borders, prefixes, _ = laid_out(layout)
    pieces = row_pieces(borders.tolist(), prefixes.tolist())
    return row_attention(*(x[0].transpose(0, 1) for x in leaves), pieces, scale)[None]


def results(layout, heads: tuple[int, int], dim: int, *, size: float = 1.0) -> dict[str, Any]:
    """Output and gradients of ours, of torch's on each sequence by itself, and in float64; what no score exceeds."""
    borders, _, sequences = laid_out(layout)
    leaves = [(x.detach() * size).requires_grad_() for x in inputs(int(borders[-1]), *heads, dim, torch.float32)]
    exact, scale = [x.detach().double().requires_grad_() for x in leaves], dim**-0.5
    theirs = torch.zeros_like(leaves[0])
    for rows in sequences:
        parts = (x[:, :, rows] for x in leaves)
        theirs = theirs.index_copy(2, rows, scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))
    q, k = (float(x.detach().norm(dim=-1).max()) for x in exact[:2])
    outs = {
        "ours": (run(leaves, layout, scale), leaves),
        "torch": (theirs.transpose(1, 2), leaves),
        "truth": (textbook(*exact, sequences, scale=scale), exact),
    }
    found = {name: [out.detach(), *gradients(out, of)] for name, (out, of) in outs.items()}
    return found | {"largest score": q * k * scale}


def assert_near(found: dict[str, Any]) -> None:
    """In norm at most twice as far from float64 as torch's, or two roundings of what weights are e to the power of."""
    rounding = 2 * torch.finfo(torch.float32).eps * max(1.0, found["largest score"])
    for ours, theirs, truth in zip(*(found[name] for name in ("ours", "torch", "truth")), strict=True):
        assert ours.isfinite().all()
        apart, allowed = (float((x.double() - truth).norm() / truth.norm()) for x in (ours, theirs))
        assert apart <= max(2 * allowed, rounding), (apart, allowed, rounding)


@HAS_CODE
@pytest.mark.parametrize("length", LENGTHS)
def test_every_remainder_of_tiles_and_blocks(length):
    """Whole sequences, prompts and completions of each length, beside one of another."""
    assert_near(results([(length, None), (3, [2, 1]), (length, [length, 50])], (4, 2), 32))


@HAS_CODE
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 1), (9, 3), (10, 5)])
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
def test_every_size_and_number_of_heads(dim, heads):
    """Sizes of which 32 is no divisor have registers of 8 everywhere; one key head has its queries cut in slices."""
    assert_near(results([(70, [60, 1, 30]), (20, None)], heads, dim))


lengths = st.integers(1, 140)
layouts = st.lists(st.tuples(lengths, st.one_of(st.none(), st.lists(lengths, min_size=1, max_size=4))), min_size=1)


@HAS_CODE
@given(layouts.filter(lambda x: len(x) < 5), st.sampled_from([16, 32]))
@settings(max_examples=25, deadline=None)
def test_any_layout(layout, dim):
    assert_near(results(layout, (4, 2), dim))


@HAS_CODE
@pytest.mark.parametrize("size", [1e-3, 6.0, 30.0])
def test_scores_near_zero_and_far_apart(size):
    """Of a few thousandths, and of hundreds and thousands, where almost every weight is 0."""
    assert_near(results([(70, [60, 1, 30]), (20, None)], (4, 2), 32, size=size))


@HAS_CODE
def test_scores_below_all_numbers_weigh_nothing():
    """The first block of keys overflows to -inf for every query; later keys alone decide, as in torch."""
    q, k, v = (x[0].detach().transpose(0, 1) for x in inputs(150, 2, 2, 16, torch.float32))
    q, k = q.abs(), k.clone()
    k[:70] = -3e38
    ours = row_attention(q, k, v, row_pieces([0, 150]), 1.0)
    theirs = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=1.0)
    torch.testing.assert_close(ours[70:], theirs.transpose(0, 1)[70:], rtol=1e-5, atol=1e-6)


@HAS_CODE
def test_pieces_without_tokens_change_nothing():
    leaves = [x.detach() for x in inputs(11, 4, 2, 16, torch.float32)]
    rows = [x[0].transpose(0, 1) for x in leaves]
    without = row_attention(*rows, row_pieces([0, 4, 7, 11], [(0, 4, 7)]), 0.3)
    assert torch.equal(row_attention(*rows, row_pieces([0, 4, 4, 7, 7, 11], [(0, 4, 7)]), 0.3), without)
    none = [x[:0] for x in rows]
    assert row_attention(*none, row_pieces([0]), 0.3).shape == (0, 4, 16)


def test_pieces_by_hand():
    pieces = row_pieces([0, 4, 7, 9, 12, 15], [(0, 4, 9), (12, 15, 15)])
    assert pieces.tolist() == [[0, 4, -1], [4, 7, 0], [7, 9, 0], [9, 12, -1], [12, 15, -1]]


GOOD = dict(q=(5, 4, 16), k=(5, 2, 16), v=(5, 2, 16), pieces=[[0, 3, -1], [3, 5, 0]])
BAD = {
    "q must be float32 on a CPU with AVX2, D a multiple of 16": dict(q=(5, 4, 8)),
    "q and k must be": dict(q=(5, 3, 16)),
    "k must fit q": dict(k=(6, 2, 16)),
    "v must be shaped as k": dict(v=(5, 1, 16)),
    "k and v must be float32 on the CPU, not torch.float32 meta": dict(k=(5, 2, 16, "meta")),
    "piece 1 must start where the one before it ends": dict(pieces=[[0, 3, -1], [2, 5, 0]]),
    "piece 0 must start": dict(pieces=[[0, -1, -1], [-1, 5, -1]]),
    "piece 1 must have an earlier piece": dict(pieces=[[0, 3, -1], [3, 5, 1]]),
    "pieces must end with 5": dict(pieces=[[0, 3, -1], [3, 6, 0]]),
    "pieces must be": dict(pieces=[[0, 3], [3, 5]]),
}


@HAS_CODE
@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    given = GOOD | BAD[message]
    tensors = [torch.zeros(given[name][:3], device=(*given[name], "cpu")[3]) for name in "qkv"]
    with pytest.raises(ValueError, match=message):
        row_attention(*tensors, torch.tensor(given["pieces"]), 1.0)


def numbers() -> str:
    """Figures of one layout, for another process to compare with."""
    found = results([(70, [60, 1, 30]), (20, None)], (4, 2), 32)
    assert_near(found)
    return " ".join(f"{float(x.double().square().sum()):.12e}" for x in found["ours"])


@pytest.mark.skipif(kernels.SIMD != "avx512", reason=f"this processor has no AVX-512 ({kernels.SIMD})")
def test_registers_of_8_pass_the_same():
    """Both widths are near float64, and they are two: sums of other lengths round to other bits."""
    script = (
        "import test_row_attention as t\n"
        "[t.test_every_remainder_of_tiles_and_blocks(n) for n in t.LENGTHS]\n"
        "[t.test_every_size_and_number_of_heads(d, (6, 1)) for d in (16, 32, 64)]\n"
        "[t.test_scores_near_zero_and_far_apart(s) for s in (1e-3, 30.0)]\nprint(t.numbers())\n"
    )
    narrow = run_with(script, "avx2", FASTRL_FORCE_AVX2="1").strip()
    assert narrow != numbers()


def test_other_processors_have_no_code_and_say_so():
    printed = run_with_scalar_code(
        "import torch\nfrom fastrl_fast.ops.row_attention import has_row_kernel\n"
        "x = torch.zeros(1, 1, 16)\nprint(has_row_kernel(x, x))\n"
        "import test_prefix_attention as t\nt.test_rounds_as_torch_does('in stairs', torch.float32, 32)\n"
    )
    assert printed.strip() == "False"
    for x in (torch.zeros(1, 1, 16, dtype=torch.float64), torch.zeros(1, 1, 8), torch.zeros(1, 1, 16).bfloat16()):
        assert not has_row_kernel(x, x)
