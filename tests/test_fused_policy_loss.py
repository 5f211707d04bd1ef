"""The fused loss against the two operators it replaces, and its gradient against float64 truth."""

import itertools
import math

import pytest
import torch
from numerics import assert_at_most_twice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_fast.ops import (
    Importance,
    LossSettings,
    fused_policy_loss,
    importance_weights,
    logit_chunks,
    logit_slabs,
    packed_logprobs,
    policy_loss,
    reference,
)
from fastrl_fast.ops.loss_rows import Columns, LossNumbers, LossRows

HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"temperature": 1.3, "softcap": 5.0, "logit_scale": 0.5},
}
LOSSES = {
    "on policy": {},
    "clipped": {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.5},
    "cispo": {"clip": "cispo"},
    "kl": {"kl_coef": 0.3},
}
LENGTHS = [7, 1, 0, 12, 5]


@pytest.fixture
def small_chunks(monkeypatch):
    """Four chunks of rows, several slabs each."""
    monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", 8)
    monkeypatch.setitem(logit_slabs.LIMITS, "cpu", logit_slabs.SlabLimits(elements=8 * 27, rows=16, columns=100))


def make(name="on policy", *, dtype=torch.float64, rows=11, h=6, v=101, seed=0, spread=0.3):
    """hidden, weight and bias as leaves; what follows them by position; tensors by keyword."""
    generator = torch.Generator().manual_seed(seed)
    n, s = sum(LENGTHS), len(LENGTHS)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    leaves = [noise(rows, h) * 2 / math.sqrt(h), noise(v, h), noise(v)]
    targets, row_index = torch.randint(v, (n,), generator=generator), torch.randint(rows, (n,), generator=generator)
    advantages = noise(s)
    advantages[1] = 0.0
    weights, cu = noise(s).abs() + 0.1, torch.tensor([0, *LENGTHS]).cumsum(0)
    own = reference.packed_logprobs(*leaves[:2], targets, row_index=row_index, bias=leaves[2])[0].to(dtype)
    optional = {"row_index": row_index, "rollout_logprobs": own + 0.1 * noise(n)}
    if name in ("clipped", "cispo"):
        optional |= {"old_logprobs": own + spread * noise(n), "token_weights": noise(n).abs().clamp(min=0.2) - 0.2}
    if name == "kl":
        optional["ref_logprobs"] = own + spread * noise(n)
    return [x.requires_grad_() for x in leaves], (targets, advantages, weights, cu), optional


def unfused(hidden, weight, targets, *rest, row_index, bias, head, exact=False, **options):
    """The same from packed_logprobs and policy_loss, or from their references."""
    logprobs_of, loss_of = (
        (reference.packed_logprobs, reference.policy_loss) if exact else (packed_logprobs, policy_loss)
    )
    logprobs, entropy = logprobs_of(hidden, weight, targets, row_index=row_index, bias=bias, **head)
    loss, stats = loss_of(logprobs, *rest, **options)
    return loss, logprobs.detach(), entropy.detach(), stats if isinstance(stats, dict) else stats._asdict()


def fused(hidden, weight, targets, *rest, head, **options):
    loss, logprobs, entropy, stats = fused_policy_loss(hidden, weight, targets, *rest, **head, **options)
    return loss, logprobs, entropy, stats._asdict()


def run(function, leaves, rest, optional, **options):
    hidden, weight, bias = leaves
    outputs = function(hidden, weight, *rest, bias=bias, **optional, **options)
    return outputs, torch.autograd.grad(outputs[0], leaves)


@pytest.fixture
def borrowed_chunks(small_chunks, monkeypatch):
    """The first chunk is of 6 rows, as many as lie in the gradient of the weight; the others are of 4."""
    monkeypatch.setitem(logit_chunks.CHUNK_ELEMENTS, "cpu", 4 * 101)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunks", ["small_chunks", "borrowed_chunks"])
def test_equals_the_two_operators(name, head, chunks, request):
    request.getfixturevalue(chunks)
    for seed in range(3):
        case = make(name, seed=seed)
        ours, gradients = run(fused, *case, head=head, **LOSSES[name])
        truth, true_gradients = run(unfused, *case, head=head, **LOSSES[name])
        torch.testing.assert_close(ours[:3], truth[:3], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(gradients, true_gradients, rtol=1e-10, atol=1e-13)
        for key, value in truth[3].items():
            torch.testing.assert_close(ours[3][key], value, rtol=1e-11, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_exact_as_torch(name, borrowed_chunks):
    assert_as_exact_as_torch(make(name, dtype=torch.float32, h=24, v=1003), LOSSES[name])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["logits of 50", "one token", "forbidden tokens"])
def test_extremes(case, name, borrowed_chunks):
    leaves, (targets, advantages, weights, cu), optional = make(name, dtype=torch.float32, h=24, v=203)
    hidden, _, bias = (x.detach() for x in leaves)
    largest = 20.0
    if case == "logits of 50":
        hidden *= 25
        largest = 400.0
    if case == "forbidden tokens":
        bias[:120] = -math.inf  # whole slabs of nothing come first
        targets = targets % 83 + 120
    if case == "one token":
        targets, advantages, weights, cu = targets[:1], advantages[:1], weights[:1], torch.tensor([0, 1])
        optional = {n: x[:1] for n, x in optional.items()}
    rest = (targets, advantages, weights, cu)
    own = reference.packed_logprobs(*leaves[:2], targets, row_index=optional["row_index"], bias=leaves[2])[0]
    for column, gap in (("old_logprobs", 0.06), ("ref_logprobs", 0.3)):
        if column in optional:
            optional[column] = (own.detach() + gap * torch.sin(torch.arange(len(own)))).float()
    assert_as_exact_as_torch((leaves, rest, optional), LOSSES[name], largest=largest)


def assert_as_exact_as_torch(case, loss, *, largest=20.0):
    """`largest`: the largest logit, of which a logprob is a difference."""
    wide = ([x.detach().double().requires_grad_() for x in case[0]],
            tuple(x.double() if x.is_floating_point() else x for x in case[1]),
            {k: v.double() if v.is_floating_point() else v for k, v in case[2].items()})  # fmt: skip
    ours = run(fused, *case, head={}, **loss)
    torchs = run(lambda *a, **k: unfused(*a, exact=True, **k), *case, head={"dtype": torch.float32}, **loss)
    truth = run(lambda *a, **k: unfused(*a, exact=True, **k), *wide, head={}, **loss)
    for x, y, t in zip(ours[0][1:3], torchs[0][1:3], truth[0][1:3], strict=True):
        assert_at_most_twice(x, y, t, size=largest)
    for x, y, t, size in zip(ours[1], torchs[1], truth[1], (3.5, 1.0, 1.0), strict=True):
        assert_at_most_twice(x, y, t, size=largest * size)


class Made(TorchDispatchMode):
    """Address and bytes of every storage that an operation returned."""

    def __init__(self):
        super().__init__()
        self.storages = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.storages.add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        return result


def test_logits_of_few_rows_need_no_memory_but_that_of_the_gradient(monkeypatch):
    """As many rows as the head is wide: beside the weight's gradient, the largest thing made is a slab."""
    slab = 24 * 100
    monkeypatch.setitem(logit_slabs.LIMITS, "cpu", logit_slabs.SlabLimits(elements=slab, rows=24, columns=100))
    hidden, weight = torch.randn(24, 24), torch.randn(5003, 24)
    numbers = torch.arange(24)
    loss = LossRows(Columns(*[None] * 4, torch.ones(24), torch.ones(24), torch.arange(25)),
                    LossNumbers(*LossSettings().numbers(), 0, 2.0, 0.0), torch.float32)  # fmt: skip
    head = logit_slabs.Head(
        weight=weight, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, dtype=torch.float32
    )
    with Made() as made:
        logit_chunks.walk(hidden, numbers, head, loss, (True, True, False))
    sizes = sorted(size for address, size in made.storages if address != weight.data_ptr())
    assert sizes[-1] == weight.nbytes and sizes[-2] <= 4 * slab


@pytest.mark.parametrize("rows", [8, 12, 1024], ids=["made twice", "chunks", "one chunk"])
@pytest.mark.parametrize("ratio", ["sequence", "sequence_token"])
@pytest.mark.parametrize("name", LOSSES)
def test_ratios_of_sequences(name, ratio, rows, small_chunks, monkeypatch):
    """A chunk holds whole sequences (the longest has 12 tokens), or, where it can't, the logits are made twice."""
    monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", rows)
    for seed in range(3):
        leaves, rest, optional = make(name, seed=seed, spread=0.1)
        settings = {"clip_low": 0.02, "clip_high": 0.02} | LOSSES[name] | {"ratio": ratio}
        for old in (optional.pop("old_logprobs", None), None, rest[1].new_full((25,), -4.0)):
            changed = optional | {"old_logprobs": old}
            ours, gradients = run(fused, leaves, rest, changed, head={}, **settings)
            truth, true_gradients = run(unfused, leaves, rest, changed, head={}, **settings)
            torch.testing.assert_close(ours[:3], truth[:3], rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(gradients, true_gradients, rtol=1e-10, atol=1e-13)
            for key, value in truth[3].items():
                torch.testing.assert_close(ours[3][key], value, rtol=1e-11, atol=1e-13, msg=key)


def logits_made(monkeypatch):
    """A list that fills with the rows of each GEMM of logits."""
    seen, fill = [], logit_slabs.Head.fill
    monkeypatch.setattr(logit_slabs.Head, "fill", lambda self, x, *a: (seen.append(len(x)), fill(self, x, *a)))
    return seen


def test_chunks_of_whole_sequences_make_their_logits_once(monkeypatch):
    leaves, rest, optional = make("clipped")
    del optional["token_weights"]
    seen = logits_made(monkeypatch)
    for rows, made in ((12, [7, 12, 5, 1]), (19, [19, 5, 1]), (11, [24, 24, 1])):
        monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", rows)
        seen.clear()
        run(fused, leaves, rest, optional, head={}, ratio="sequence", clip_low=9, clip_high=99)
        assert seen == made, "the lone token has no advantage; 11 rows are too few for the sequence of 12"


IMPORTANCE = {
    "token_truncate": Importance("token_truncate", cap=1.1),
    "token_mask": Importance("token_mask", cap=1.1, floor=0.95),
    "sequence_truncate": Importance("sequence_truncate", cap=1.05),
    "sequence_mask": Importance("sequence_mask", cap=1.4, floor=0.8),
}


def weighted_loss(leaves, rest, optional, importance, *, ratio, kl_coef):
    """The corrected PPO loss in plain float64 loops over sequences and tokens."""
    hidden, weight, bias = leaves
    targets, advantages, weights, cu = rest
    logprobs, _ = reference.packed_logprobs(hidden, weight, targets, row_index=optional["row_index"], bias=bias)
    old = optional["old_logprobs"] if optional.get("old_logprobs") is not None else logprobs.detach()
    loss = 0.0
    for s, (a, b) in enumerate(itertools.pairwise(cu.tolist())):
        gaps = (old - optional["rollout_logprobs"])[a:b]
        for t in range(a, b):
            u = float((gaps.sum() if importance.of_sequences else gaps[t - a]).exp())
            w = min(u, importance.cap)
            if importance.masks:
                w = u if importance.floor <= u <= importance.cap else 0.0
            log_ratio = logprobs[t] - old[t] if ratio == "token" else (logprobs - old)[a:b].mean()
            r, advantage = log_ratio.exp(), advantages[s]
            term = w * torch.maximum(-advantage * r, -advantage * r.clamp(0.98, 1.03))
            if kl_coef:
                d = logprobs[t] - optional["ref_logprobs"][t]
                term = term + kl_coef * ((-d).exp() - 1 + d)
            loss = loss + weights[s] * term
    return (loss,)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("old", ["own", "given"])
@pytest.mark.parametrize(("ratio", "kind"), [
    *(("token", kind) for kind in IMPORTANCE), ("sequence", "sequence_truncate"), ("sequence", "sequence_mask"),
])  # fmt: skip
def test_importance_weights_multiply_the_advantage_alone(ratio, kind, old, kl_coef, small_chunks, monkeypatch):
    monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", 12)
    importance = IMPORTANCE[kind]
    leaves, rest, optional = make("kl", seed=1, spread=0.2)
    if old == "given":
        optional["old_logprobs"] = optional["rollout_logprobs"] + 0.1 * torch.sin(torch.arange(25.0).double())
    settings = {"ratio": ratio, "kl_coef": kl_coef}
    truth, true_gradients = run(lambda h, w, *r, bias, row_index, ratio, kl_coef, **o: weighted_loss(
        (h, w, bias), r, o | {"row_index": row_index}, importance, ratio=ratio, kl_coef=kl_coef
    ), leaves, rest, optional, **settings)  # fmt: skip
    ours, gradients = run(
        fused, leaves, rest, optional, head={}, importance=importance, clip_low=0.02, clip_high=0.03, **settings
    )
    assert float(ours[0].detach()) == pytest.approx(float(truth[0].detach()), rel=1e-12)
    torch.testing.assert_close(gradients, true_gradients, rtol=1e-10, atol=1e-13)
    plain = run(fused, leaves, rest, optional, head={}, clip_low=0.02, clip_high=0.03, **settings)[1]
    assert not torch.allclose(plain[0], gradients[0], rtol=1e-3)


@pytest.mark.parametrize("old", ["own", "given"])
@pytest.mark.parametrize("kind", IMPORTANCE)
def test_a_masked_token_weighs_nothing_in_its_sequence(kind, old, small_chunks, monkeypatch):
    """Masking tokens equals taking them out, whatever their logprobs are, with the policy's own old ones or given."""
    monkeypatch.setitem(logit_chunks.CHUNK_ROWS, "cpu", 12)
    leaves, (targets, *per_sequence, cu), optional = make("kl", seed=2)
    masked = torch.arange(25) % 3 == 0
    if old == "given":
        optional["old_logprobs"] = optional["rollout_logprobs"] + 0.1 * torch.sin(torch.arange(25.0).double())
    few = {name: x[~masked] for name, x in optional.items()}
    left = torch.cat([cu.new_zeros(1), (~masked).cumsum(0)])[cu]
    settings = {"head": {}, "importance": IMPORTANCE[kind], "kl_coef": 0.3}
    truth, true_gradients = run(fused, leaves, (targets[~masked], *per_sequence, left), few, **settings)
    broken = {n: x.masked_fill(masked, math.nan) if n != "row_index" else x for n, x in optional.items()}
    broken["token_weights"] = (~masked).double()
    ours, gradients = run(fused, leaves, (targets, *per_sequence, cu), broken, **settings)
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients, true_gradients, rtol=1e-10, atol=1e-13)


def test_importance_weights_by_hand():
    """Ratios 1.5, 0.4, 3 and, of the second sequence, 0.5: products 1.8 and 0.5."""
    logprobs = torch.tensor([1.5, 0.4, 3.0, 0.5]).log()
    case = (logprobs, torch.zeros(4), torch.tensor([0, 3, 4]))
    for kind, weights, cut in (
        ("token_truncate", [1.5, 0.4, 2.0, 0.5], [0, 0, 1, 0]),
        ("token_mask", [1.5, 0.0, 0.0, 0.5], [0, 1, 1, 0]),
        ("sequence_truncate", [1.8, 0.5], [0, 0]),
        ("sequence_mask", [1.8, 0.5], [0, 0]),
    ):
        ours = importance_weights(*case, Importance(kind, cap=2.0, floor=0.45))
        torch.testing.assert_close(ours[0], torch.tensor(weights), msg=kind)
        assert ours[1].tolist() == [bool(c) for c in cut], kind
    huge = importance_weights(torch.tensor([300.0]), torch.zeros(1), torch.tensor([0, 1]), Importance("token_truncate"))
    assert huge[0].tolist() == [2.0]


def test_rows_without_gradient_are_not_multiplied(monkeypatch):
    """No advantage, masked, clipped: the last is known only after the first GEMM."""
    seen = []
    fill, differentiate = logit_slabs.Head.fill, logit_slabs.differentiate
    monkeypatch.setattr(
        logit_slabs.Head, "fill", lambda self, x, *a: (seen.append(("made", len(x))), fill(self, x, *a))
    )
    monkeypatch.setattr(
        logit_slabs, "differentiate", lambda x, *a: (seen.append(("moved", len(x))), differentiate(x, *a))[1]
    )
    leaves, rest, optional = make()
    optional["token_weights"] = (torch.arange(25) != 3).double()
    own = packed_logprobs(*leaves[:2], rest[0], row_index=optional["row_index"], bias=leaves[2])[0]
    optional["old_logprobs"] = own.detach() - 1  # every ratio is e, far above the clip
    seen.clear()
    run(fused, leaves, rest, optional, head={})
    positive = int((torch.repeat_interleave(rest[1], rest[3].diff()) * optional["token_weights"] > 0).sum())
    quiet = 1 + LENGTHS[1]
    moved = 25 - quiet - positive
    assert seen == [("made", 25 - quiet), *([("moved", moved)] if moved else []), ("made", quiet)]


def test_low_precision_is_float32_inside():
    leaves, rest, optional = make(dtype=torch.float32, h=24, v=1003)
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    same = [x.detach().float().requires_grad_() for x in low]
    (ours, gradients), (exact, exact_gradients) = (run(fused, x, rest, optional, head={}) for x in (low, same))
    assert all(torch.equal(x, y) for x, y in zip(ours[:3], exact[:3], strict=True))
    for x, y in zip(gradients, exact_gradients, strict=True):
        assert x.dtype == torch.bfloat16 and torch.equal(x, y.bfloat16())


def test_backward_scales_and_frozen_tensors_get_none():
    leaves, rest, optional = make()
    once, thrice = (
        run(lambda *a, f=f, **k: (fused(*a, **k)[0] * f,), leaves, rest, optional, head={})[1] for f in (1, 3)
    )
    for x, y in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * x, y)
    hidden, weight, bias = leaves
    loss = fused_policy_loss(hidden, weight.detach(), *rest, bias=bias.detach(), **optional)[0]
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], once[0])
    with torch.no_grad():
        assert torch.equal(fused_policy_loss(hidden, weight, *rest, bias=bias, **optional)[0], loss)


def test_no_tokens():
    leaves, (_, _, _, _), _ = make()
    none, cu = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    outputs, gradients = run(fused, leaves, (none, torch.ones(1), torch.ones(1), cu), {"row_index": none}, head={})
    assert float(outputs[0].detach()) == 0 and outputs[1].shape == (0,)
    assert not any(bool(x.any()) for x in gradients)


def test_thread_count_changes_no_bit():
    case = make(dtype=torch.float32, h=24, v=8009)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs, gradients = run(fused, *case, head={})
            results.append([*outputs[:3], *outputs[3].values(), *gradients])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_opcheck_gradcheck_and_compile(small_chunks):
    (hidden, weight, bias), rest, optional = make("clipped")
    targets, advantages, weights, cu = rest
    arguments = (
        hidden, weight, targets, optional["row_index"], bias, 0.7, None, 1.0, optional["old_logprobs"], None, None,
        optional["token_weights"], advantages, weights, cu, 0, 0, 2, 0.2, 0.2, math.inf, 0.0, 0, 2.0, 0.0,
        [True, True, True],
    )  # fmt: skip
    torch.library.opcheck(torch.ops.fastrl_fast.fused_policy_loss.default, arguments)

    def loss(*leaves):
        x, w, b = leaves
        return fused_policy_loss(x, w, *rest, bias=b, **optional, clip_low=0.9, clip_high=9.0)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(*(torch.autograd.grad(f(hidden, weight, bias), (hidden, weight, bias)) for f in (loss, compiled)),
                    strict=True):  # fmt: skip
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"clip_low": -1.0}, "clip_low must be >= 0"),
        ({"kl_coef": 0.1}, "kl_coef = 0.1 needs ref_logprobs"),
        ({"importance": Importance("token_mask")}, "importance.kind = token_mask needs rollout_logprobs"),
        (
            {"importance": Importance("token_mask"), "rollout_logprobs": torch.zeros(25), "ratio": "sequence"},
            "importance.kind must be of sequences where ratio is 'sequence', not token_mask",
        ),
        ({"importance": Importance("most")}, "importance.kind must be one of none, token_truncate"),
        ({"importance": Importance(cap=1.0, floor=1.5)}, "importance.floor must be in [0, importance.cap = 1.0]"),
        ({"old_logprobs": torch.zeros(3)}, "old_logprobs must be one per token (25), not [3]"),
    ],
)
def test_what_is_refused(change, message):
    (hidden, weight, _), rest, optional = make()
    with pytest.raises(ValueError) as caught:
        fused_policy_loss(hidden, weight, *rest, row_index=optional["row_index"], **change)
    assert message in str(caught.value)
