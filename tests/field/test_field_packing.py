"""Public bug reports about packed rows and the LM head, each on its smallest input."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from test_model import alone, sequences
from transformers import GPT2Config, GPT2LMHeadModel

import fastrl_fast
from fastrl_fast.model import Policy
from fastrl_fast.ops import packed_logprobs
from fastrl_fast.packing import Sequence, pack


def test_K03_K05_the_truth_is_each_row_alone_without_padding(make_lm) -> None:
    lm = make_lm(dtype=torch.float32)
    expected = torch.cat([alone(lm, s, 1.0)[0] for s in sequences()]).detach()
    policy = Policy(copy.deepcopy(lm), temperature=1.0)
    together = policy(pack(sequences()))[0].detach()
    one_by_one = torch.cat([policy(pack([s]))[0] for s in sequences()]).detach()
    assert float((together - expected).abs().max()) < 1e-5
    assert float((together - one_by_one).abs().max()) < 1e-5


def test_K04_positions_do_not_depend_on_what_stands_before() -> None:
    """Absolute positions: with padding they would shift; packed rows begin at 0 wherever they lie."""
    torch.manual_seed(0)
    sizes = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=64)
    lm = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    policy = Policy(lm, temperature=1.0)
    row = Sequence([4, 5], [6, 7, 8], [0.0] * 3, 1.0, 1.0)
    first = policy(pack([row]))[0].detach()
    for before in (1, 3, 8):
        other = Sequence([9] * before, [9], [0.0], 1.0, 1.0)
        later = policy(pack([other, row]))[0].detach()[1:]
        assert float((later - first).abs().max()) < 1e-4


def test_K06_a_row_does_not_see_its_neighbour(make_lm) -> None:
    policy = Policy(make_lm(dtype=torch.float32), temperature=1.0)
    rows = [Sequence([1, 2], [3, 4], [0.0] * 2, 1.0, 1.0), Sequence([5], [6, 7], [0.0] * 2, 1.0, 1.0)]
    changed = [Sequence([8, 9], [3, 4], [0.0] * 2, 1.0, 1.0), rows[1]]
    before, after = policy(pack(rows))[0], policy(pack(changed))[0]
    assert torch.equal(before[2:], after[2:]) and not torch.equal(before[:2], after[:2])


def test_K09_the_head_is_the_plain_formula_in_pieces() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(50, 8), torch.randn(700, 8), torch.randint(700, (50,))
    logprobs, entropy = packed_logprobs(hidden, weight, targets)
    plain = (hidden @ weight.T).double().log_softmax(-1)
    assert float((logprobs - plain.gather(1, targets[:, None])[:, 0]).abs().max()) < 1e-5
    assert float((entropy + (plain.exp() * plain).sum(-1)).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_L14_the_softmax_is_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16).to(dtype), (torch.randn(20_000, 16) * 0.75).to(dtype)
    targets = torch.randint(20_000, (8,))
    logprobs, _ = packed_logprobs(hidden, weight, targets)
    truth = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32 and float((logprobs - truth).abs().max()) < 1e-4


def test_Z01_every_launch_is_under_a_device_guard() -> None:
    """`cuda_stream` makes the tensor's device current; no kernel is called outside of it."""
    launches = 0
    for path in (Path(fastrl_fast.__file__).parent / "ops").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            call
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "cuda_stream(" in ast.unparse(block.items[0])
            for call in ast.walk(block)
            if isinstance(call, ast.Call)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and re.fullmatch(r"kernels\.\w+_cuda", ast.unparse(call.func)):
                assert call in guarded, f"{path.name}: {ast.unparse(call)}"
                launches += 1
    assert launches > 4


def test_V15_the_policy_is_the_same_twice_though_it_is_in_training_mode(make_lm, tmp_path) -> None:
    from fastrl_fast.config import ModelConfig
    from fastrl_fast.model import build_policy, load_causal_lm

    make_lm(dtype=torch.float32, attention_dropout=0.5).save_pretrained(tmp_path)
    settings = ModelConfig(path="m")
    policy = build_policy(load_causal_lm(str(tmp_path), settings), settings, temperature=1.0)
    assert policy.training
    assert torch.equal(policy(pack(sequences()))[0], policy(pack(sequences()))[0])
