"""Our operators beside TRL's, Liger's and verl's: the same numbers where they promise the same, and ours nearer to
float64. `pip install '.[reference]'`; verl needs ray, tensordict, hydra-core and orjson beside it."""

import importlib
import math

import pytest
import torch
from numerics import error

from fastrl_fast.ops import fused_policy_loss, group_advantage, packed_logprobs, reference

pytestmark = pytest.mark.reference


def load(module):
    """The module; where it cannot be imported for whatever reason, skip with that reason."""
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        pytest.skip(f"{module}: {failure}")


def head(t, h, v, dtype=torch.float32, spread=2.0):
    make = torch.Generator().manual_seed(0)
    hidden = (torch.randn(t, h, generator=make) * spread / math.sqrt(h)).to(dtype)
    weight = torch.randn(v, h, generator=make).to(dtype)
    return hidden, weight, torch.randint(v, (t,), generator=make)


def assert_at_most_twice_theirs(ours, theirs, truth):
    """Or one float32 rounding of the largest true value."""
    allowed = max(2 * error(theirs, truth), float(truth.abs().max()) * 2**-23)
    print(f"error {error(ours, truth):.2e}, theirs {error(theirs, truth):.2e}")
    assert error(ours, truth) <= allowed


@pytest.mark.parametrize("spread", [2.0, 50.0])
def test_trl_selective_log_softmax(spread):
    utils = load("trl.trainer.utils")
    hidden, weight, targets = head(130, 64, 4099, spread=spread)
    theirs = utils.selective_log_softmax(hidden @ weight.t(), targets)
    truth, _ = reference.packed_logprobs(hidden, weight, targets)
    assert_at_most_twice_theirs(packed_logprobs(hidden, weight, targets)[0], theirs, truth)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "softcap": 5.0, "logit_scale": 0.5}], ids=["", "softcap"]
)
def test_trl_chunked_logprobs_with_entropy_and_gradients(settings):
    utils = load("trl.trainer.utils")
    hidden, weight, targets = head(130, 64, 4099)
    upstream = torch.randn(2, 130, generator=torch.Generator().manual_seed(1)).unbind()
    options = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, **settings}

    def theirs(h, w):
        arguments = (options["temperature"], 1000, options["softcap"], options["logit_scale"], ("entropy",))
        return utils._ChunkedLogProbFunction.apply(h, w, None, targets, *arguments)[:2]

    results = []
    for function, dtype in (
        (lambda h, w: packed_logprobs(h, w, targets, **settings), torch.float32),
        (theirs, torch.float32),
        (lambda h, w: reference.packed_logprobs(h, w, targets, **settings), torch.float64),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        outputs = function(*leaves)
        gradients = torch.autograd.grad(outputs, leaves, [u.to(dtype) for u in upstream])
        results.append([*(x.detach() for x in outputs), *gradients])
    for ours, other, truth in zip(*results, strict=True):
        assert_at_most_twice_theirs(ours, other, truth)


def test_trl_multiplies_low_precision_in_low_precision():
    utils = load("trl.trainer.utils")
    hidden, weight, targets = head(130, 64, 4099, torch.bfloat16)
    outputs = ("entropy",)
    theirs = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 1000, None, 1.0, outputs)[:2]
    truth = reference.packed_logprobs(hidden, weight, targets)
    for ours, other, true in zip(packed_logprobs(hidden, weight, targets), theirs, truth, strict=True):
        assert error(ours, true) <= error(other, true) / 100


@pytest.mark.parametrize("clip_high", [0.2, 0.28])
def test_liger_fused_grpo_loss(clip_high):
    losses = load("liger_kernel.chunked_loss")
    sequences, length = 6, 20
    hidden, weight, targets = head(sequences * length, 24, 303)
    make = torch.Generator().manual_seed(2)
    advantages = torch.randn(sequences, generator=make)
    exact = reference.packed_logprobs(hidden, weight, targets)[0]
    old = (exact + 0.2 * torch.randn(exact.shape, generator=make)).float()  # so that a good part is clipped
    weights, cu = torch.full((sequences,), 1 / len(targets)), torch.arange(0, len(targets) + 1, length)

    def liger(h, w):
        function = losses.LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=False, use_ref_model=False, epsilon_high=clip_high, loss_type="dapo"
        )
        by_sequence = (targets.view(sequences, -1), torch.ones(sequences, length, dtype=torch.int64), advantages)
        inputs = h.view(sequences, length, -1)
        return function(inputs, w, *by_sequence, old_per_token_logps=old.view(sequences, -1))[0]

    def ours(h, w):
        return fused_policy_loss(h, w, targets, advantages, weights, cu, old_logprobs=old, clip_high=clip_high)[0]

    def true(h, w):
        logprobs = reference.packed_logprobs(h, w, targets)[0]
        arguments = (advantages.double(), weights.double(), cu)
        return reference.policy_loss(logprobs, *arguments, old_logprobs=old.double(), clip_high=clip_high)[0]

    results = []
    for function, dtype in ((ours, torch.float32), (liger, torch.float32), (true, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        loss = function(*leaves)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for x, y, t in zip(*results, strict=True):
        assert_at_most_twice_theirs(x, y, t)


@pytest.mark.parametrize(
    ("function", "preset", "options"),
    [
        ("compute_grpo_outcome_advantage", "verl", {}),
        ("compute_grpo_vectorized_outcome_advantage", "verl", {}),
        ("compute_grpo_outcome_advantage", "dr_grpo", {"norm_adv_by_std_in_grpo": False}),
        ("compute_rloo_outcome_advantage", "rloo", {}),
    ],
)
def test_verl_group_advantages(function, preset, options):
    algorithms = load("verl.trainer.ppo.core_algos")
    make = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 9, (40,), generator=make)
    rewards = torch.rand(int(sizes.sum()), generator=make)
    index = torch.repeat_interleave(torch.arange(40), sizes).numpy()
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    scores = rewards[:, None].clone()
    theirs = getattr(algorithms, function)(scores, torch.ones_like(scores), index, **options)[0][:, 0]
    truth, _ = reference.group_advantage(rewards, cu, preset=preset)
    assert_at_most_twice_theirs(group_advantage(rewards, cu, preset=preset)[0], theirs, truth)
