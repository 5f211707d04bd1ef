"""The operator against the eager formula in float64, where that is defined, and against by-hand numbers elsewhere."""

import hashlib
import itertools
import math

import pytest
import torch
from numerics import assert_at_most_twice, error, run_with_scalar_code
from torch import Tensor

from fastrl_fast.ops import policy_loss, reference
from fastrl_fast.ops.loss_settings import CLIP_KINDS, KL_KINDS, RATIO_KINDS

KINDS = list(itertools.product(RATIO_KINDS, CLIP_KINDS))
LENGTHS = [3, 1, 0, 17, 2, 5, 1, 9]


def make(lengths=LENGTHS, *, dtype=torch.float64, seed=0, spread=0.4):
    """Positional and keyword tensors of a call in which clips, both signs and all optional inputs occur."""
    generator = torch.Generator().manual_seed(seed)
    s, n = len(lengths), sum(lengths)

    def noise(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    logprobs = -noise(n).abs()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [logprobs, noise(s), 0.1 + noise(s).abs()]
    optional = {f"{name}_logprobs": logprobs + spread * noise(n) for name in ("old", "ref", "rollout")}
    optional["token_weights"] = 0.1 + noise(n).abs()
    tensors = [x.to(dtype) for x in tensors]
    return tensors[0].requires_grad_(), (*tensors[1:], cu), {k: v.to(dtype) for k, v in optional.items()}


def run(function, logprobs, rest, optional, **settings):
    loss, stats = function(logprobs, *rest, **optional, **settings)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, stats if isinstance(stats, dict) else stats._asdict()


@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("dual_clip", [None, 1.1])
@pytest.mark.parametrize(("ratio", "clip"), KINDS)
def test_equals_the_eager_formula(ratio, clip, dual_clip, kl):
    settings = dict(ratio=ratio, clip=clip, dual_clip=dual_clip, kl=kl, kl_coef=0.3, clip_low=0.05, clip_high=0.1)
    for seed in range(3):
        case = make(seed=seed)
        loss, gradient, stats = run(policy_loss, *case, **settings)
        truth = run(reference.policy_loss, *case, **settings)
        torch.testing.assert_close(loss, truth[0], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient, truth[1], rtol=1e-12, atol=1e-14)
        assert stats.keys() == truth[2].keys()
        for name, value in truth[2].items():
            assert float(stats[name]) == pytest.approx(float(value), rel=1e-12), name


@pytest.mark.parametrize(("ratio", "clip"), KINDS)
def test_float32_is_as_exact_as_torch(ratio, clip):
    settings = dict(ratio=ratio, clip=clip, dual_clip=3.0, kl_coef=0.3)
    case = make([40, 7, 300, 81], dtype=torch.float32, spread=0.1)
    wide = (
        case[0].detach().double().requires_grad_(),
        tuple(x.double() if x.is_floating_point() else x for x in case[1]),
        {k: v.double() for k, v in case[2].items()},
    )
    ours, torchs, truth = (
        run(policy_loss, *case, **settings),
        run(reference.policy_loss, *case, **settings),
        run(reference.policy_loss, *wide, **settings),
    )
    assert ours[0].dtype == ours[1].dtype == torch.float32
    assert_at_most_twice(ours[1], torchs[1], truth[1])
    assert error(ours[0], truth[0]) <= 1e-6 * float(ours[1].abs().sum())
    assert abs(float(ours[2]["ratio"] - truth[2]["ratio"])) <= 1e-6 * float(truth[2]["tokens"])


@pytest.mark.parametrize("missing", ["old_logprobs", "ref_logprobs", "rollout_logprobs", "token_weights"])
@pytest.mark.parametrize(("ratio", "clip"), KINDS)
def test_what_is_not_given(ratio, clip, missing):
    logprobs, rest, optional = make()
    del optional[missing]
    ours = run(policy_loss, logprobs, rest, optional, ratio=ratio, clip=clip)
    truth = run(reference.policy_loss, logprobs, rest, optional, ratio=ratio, clip=clip)
    torch.testing.assert_close(ours[:2], truth[:2], rtol=1e-12, atol=1e-14)
    if missing == "old_logprobs":
        assert float(ours[2]["ratio_min"]) == float(ours[2]["ratio_max"]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ratio", "clip"), KINDS)
def test_masked_tokens_are_not_there_whatever_they_hold(ratio, clip, dtype):
    logprobs, rest, optional = make(dtype=dtype)
    live = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2)) < 0.6
    live[4:6] = False
    cuts = rest[2].tolist()
    lengths = [int(live[a:b].sum()) for a, b in itertools.pairwise(cuts)]
    fewer = (*rest[:2], torch.tensor([0, *lengths]).cumsum(0))
    settings = dict(ratio=ratio, clip=clip, kl_coef=0.1)
    left = {k: v[live] for k, v in optional.items()}
    expected = run(policy_loss, logprobs.detach()[live].requires_grad_(), fewer, left, **settings)
    for poison in (0.0, math.nan, math.inf, -math.inf):
        spoilt = {k: v.masked_fill(~live, poison if k != "token_weights" else 0.0) for k, v in optional.items()}
        loss, gradient, stats = run(
            policy_loss, logprobs.detach().masked_fill(~live, poison).requires_grad_(), rest, spoilt, **settings
        )
        assert not gradient[~live].any()
        # sums are made in other groups of four
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(loss, expected[0], rtol=tolerance, atol=0)
        torch.testing.assert_close(gradient[live], expected[1], rtol=tolerance, atol=0)
        for name, value in expected[2].items():
            torch.testing.assert_close(stats[name], value, rtol=tolerance, atol=0)


@pytest.mark.parametrize(("ratio", "clip"), KINDS)
def test_nothing_overflows(ratio, clip):
    for gap, dtype in itertools.product((-1e30, -100.0, 100.0, 1e30), (torch.float32, torch.float64)):
        far = torch.full((4,), gap, dtype=dtype)
        logprobs = torch.zeros(4, dtype=dtype, requires_grad=True)
        rest = (torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([0, 2, 4]))
        for kl in KL_KINDS:
            loss, gradient, stats = run(
                policy_loss, logprobs, rest, {"old_logprobs": far, "ref_logprobs": far}, ratio=ratio, clip=clip, kl=kl,
                kl_coef=0.1,
            )  # fmt: skip
            assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
            assert float(stats["ratio_max"]) <= math.exp(20) * (1 + 1e-6)


def test_no_advantage_no_gradient_even_of_an_impossible_token():
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    rest = (torch.zeros(1), torch.ones(1), torch.tensor([0, 2]))
    for ratio, clip in KINDS:
        loss, gradient, _ = run(policy_loss, logprobs, rest, {"old_logprobs": torch.zeros(2)}, ratio=ratio, clip=clip)
        assert float(loss) == 0 and gradient.tolist() == [0, 0]


def test_a_broken_logprob_is_seen():
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    rest = (torch.ones(1), torch.ones(1), torch.tensor([0, 2]))
    loss, gradient, _ = run(policy_loss, logprobs, rest, {"old_logprobs": torch.zeros(2)})
    assert bool(loss.isnan()) and gradient.isnan().tolist() == [False, True]


def test_no_tokens_and_no_sequences():
    for lengths in ([], [0], [0, 0, 0]):
        logprobs, rest, optional = make(lengths)
        loss, gradient, stats = run(policy_loss, logprobs, rest, optional, ratio="sequence", kl_coef=0.1)
        assert float(loss) == 0 and gradient.shape == (0,)
        assert float(stats["ratio_min"]) == math.inf and float(stats["ratio_max"]) == -math.inf
        assert float(stats["tokens"]) == float(stats["kl"]) == 0


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradcheck(ratio):
    """For losses without stopped gradients."""
    logprobs, rest, optional = make([3, 2, 4], spread=0.05)
    settings = dict(ratio=ratio, clip_low=0.02, clip_high=0.03, kl_coef=0.2)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, *rest, **optional, **settings)[0], logprobs)


def test_the_thread_count_changes_no_bit():
    lengths = torch.randint(0, 200, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    logprobs, rest, optional = make(lengths, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            loss, gradient, stats = run(policy_loss, logprobs, rest, optional, ratio="sequence", kl_coef=0.1)
            results.append([loss, gradient, *stats.values()])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def bits_of_all_kinds() -> str:
    """A digest of everything that the operator returns, in float32, for all kinds; to be printed by another process."""
    digest = hashlib.sha256()
    for (ratio, clip), kl in itertools.product(KINDS, KL_KINDS):
        case = make([300, 7, 0, 1, 81], dtype=torch.float32)
        loss, gradient, stats = run(policy_loss, *case, ratio=ratio, clip=clip, kl=kl, kl_coef=0.3, dual_clip=1.1)
        for tensor in (loss, gradient, *stats.values()):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_scalar_code_gives_the_same_bits():
    printed = run_with_scalar_code("import test_policy_loss_op\nprint(test_policy_loss_op.bits_of_all_kinds())")
    assert printed.strip() == bits_of_all_kinds()


def test_opcheck_and_compile():
    logprobs, rest, optional = make()
    arguments = (logprobs, *(optional[f"{n}_logprobs"] for n in ("old", "ref", "rollout")), *rest[:2],
                 optional["token_weights"], rest[2], 0, 0, 2, 0.2, 0.2, math.inf, 0.1)  # fmt: skip
    torch.library.opcheck(torch.ops.fastrl_fast.policy_loss.default, arguments)
    few = (logprobs.detach().float().requires_grad_(), None, None, None, *(x.float() for x in rest[:2]), None, rest[2])
    torch.library.opcheck(torch.ops.fastrl_fast.policy_loss.default, (*few, 1, 1, 0, 0.2, 0.2, 3.0, 0.0))

    def loss(x):
        value, stats = policy_loss(x * 2, *rest, **optional)
        return value + 0 * stats.ratio

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(f(logprobs), logprobs)[0] for f in (loss, compiled)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": "group"}, "ratio must be one of token, sequence, sequence_token, not 'group'"),
        ({"clip": "none"}, "clip must be one of ppo, cispo, not 'none'"),
        ({"kl": "k4"}, "kl must be one of k1, k2, k3, not 'k4'"),
        ({"clip_low": -0.1}, "clip_low must be >= 0, not -0.1"),
        ({"clip_high": math.nan}, "clip_high must be >= 0, not nan"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1 or None, not 1.0"),
        ({"kl_coef": 0.1}, "kl_coef = 0.1 needs ref_logprobs"),
        ({"logprobs": torch.zeros(3, dtype=torch.float16)}, "logprobs must be [N] float32 or float64"),
        ({"old_logprobs": torch.zeros(2)}, "old_logprobs must be one per token (3), not [2]"),
        ({"token_weights": torch.zeros(2)}, "token_weights must be one per token (3), not [2]"),
        ({"advantages": torch.zeros(3)}, "advantages must be one per sequence (2), not [3]"),
        ({"weights": torch.zeros(2, 1)}, "weights must be one per sequence (2), not [2, 1]"),
        ({"cu_targets": torch.tensor([0, 1, 2])}, "cu_targets must end with 3, not 2"),
        ({"cu_targets": torch.tensor([0, 4, 3])}, "cu_targets must not decrease"),
        ({"cu_targets": torch.tensor([0.0, 1, 3])}, "cu_targets must be [S + 1] int64"),
    ],
)
def test_what_is_refused(change, message):
    names = ("logprobs", "advantages", "weights", "cu_targets")
    usual = (torch.zeros(3), torch.zeros(2), torch.ones(2), torch.tensor([0, 1, 3]))
    arguments = {**dict(zip(names, usual, strict=True)), **change}
    with pytest.raises(ValueError) as caught:
        policy_loss(*[arguments.pop(name) for name in names], **arguments)
    assert message in str(caught.value)
