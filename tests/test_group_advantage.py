import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.ops import PRESETS, group_advantage, reference


def offsets(sizes):
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)


def one(rewards, preset="trl", dtype=torch.float32):
    advantages, dead = group_advantage(torch.tensor(rewards, dtype=dtype), offsets([len(rewards)]), preset=preset)
    return advantages, bool(dead[0])


def test_seven_right_and_one_wrong():
    # algorithms.md 1.7: mean 7/8, unbiased std sqrt(1/8): +0.354 and -2.475
    advantages, dead = one([1.0] * 7 + [0.0], "fastrl")
    assert not dead
    assert [round(x, 3) for x in advantages.tolist()] == [0.354] * 7 + [-2.475]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_nothing(preset, dtype):
    for value in (0.1, 0.0, 1 / 3, -7.7, 1e30):
        for n in (2, 3, 8, 64):
            advantages, dead = one([value] * n, preset, dtype)
            assert dead and bool((advantages == 0).all())


def test_the_float32_formula_would_push_where_nothing_is_to_learn():
    r = torch.full((8,), 0.1)
    assert float(((r - r.mean()) / (r.std() + 1e-6))[0]) == pytest.approx(-0.0074, abs=1e-4)  # design.md 4.2


def test_ungraded_members_are_left_out():
    nan = math.nan
    with_nan, dead = one([nan, 1.0, 0.0, nan, 0.5], "verl")
    without, _ = one([1.0, 0.0, 0.5], "verl")
    assert not dead
    assert with_nan.tolist() == [0.0, without[0], without[1], 0.0, without[2]]


@pytest.mark.parametrize("rewards", [[], [1.0], [math.nan], [math.nan, 3.0], [math.nan] * 5, [0.2, math.nan, 0.2]])
def test_groups_with_nothing_to_compare_are_dead(rewards):
    for preset in PRESETS:
        advantages, dead = one(rewards, preset)
        assert dead and advantages.tolist() == [0.0] * len(rewards)


def test_each_preset_by_hand():
    r = [0.0, 0.5, 1.5, 1.0]
    mean, std = 0.75, math.sqrt((0.75**2 + 0.25**2 + 0.75**2 + 0.25**2) / 3)
    expected = {
        "trl": [(x - mean) / (std + 1e-4) for x in r],
        "verl": [(x - mean) / (std + 1e-6) for x in r],
        "fastrl": [(x - mean) / (std + 1e-6) for x in r],
        "rloo": [x - (sum(r) - x) / 3 for x in r],
        "dr_grpo": [x - mean for x in r],
    }
    assert expected.keys() == PRESETS.keys()
    for preset, numbers in expected.items():
        assert one(r, preset)[0].tolist() == pytest.approx(numbers, rel=1e-7)


def test_large_offset_loses_nothing():
    # sum of squares minus square of sum would be all rounding here
    far, _ = one([1e9 + x for x in (0.0, 1.0, 2.0, 5.0)], "verl", torch.float64)
    near, _ = one([0.0, 1.0, 2.0, 5.0], "verl", torch.float64)
    assert torch.equal(far, near)


rewards = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.floats(-10, 10, width=32))
groups = st.lists(st.lists(rewards, max_size=40), max_size=6)


@settings(max_examples=200, deadline=None)
@given(groups, st.sampled_from(sorted(PRESETS)), st.sampled_from([torch.float32, torch.float64]))
def test_against_float64_truth(groups, preset, dtype):
    flat, cu = torch.tensor([x for g in groups for x in g], dtype=dtype), offsets([len(g) for g in groups])
    advantages, dead = group_advantage(flat, cu, preset=preset)
    truth, truly_dead = reference.group_advantage(flat, cu, preset=preset)
    assert torch.equal(dead, truly_dead)
    # Two float64 ways to a mean of numbers up to 10 differ by 1e-15; over the smallest divisor, eps = 1e-6, that is
    # 1e-9. What remains is the rounding of the result to float32.
    torch.testing.assert_close(advantages.double(), truth, rtol=2**-23, atol=1e-8)


def test_thread_count_changes_no_bit():
    make = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 64, (6000,), generator=make).tolist()
    flat, cu = torch.rand(sum(sizes), generator=make), offsets(sizes)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(group_advantage(flat, cu))
    finally:
        torch.set_num_threads(before)
    assert flat.numel() > 100_000, "below this the kernel is serial"
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_opcheck_and_compile():
    flat, cu = torch.tensor([1.0, 0.0, 0.5, math.nan]), offsets([2, 0, 2])
    torch.library.opcheck(torch.ops.fastrl_fast.group_advantage.default, (flat, cu, True, False, 1, 1e-6))

    def doubled(flat, cu):
        advantages, dead = group_advantage(flat * 2, cu, preset="dr_grpo")
        return advantages * 0.5, dead

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")(flat, cu)
    assert torch.equal(compiled[0], group_advantage(flat, cu, preset="dr_grpo")[0])
    assert compiled[1].tolist() == [False, True, True]


@pytest.mark.gpu
def test_the_cuda_kernel_agrees():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    make = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 100, (50,), generator=make).tolist()
    flat, cu = torch.rand(sum(sizes), generator=make, dtype=torch.float64), offsets(sizes)
    flat[::7] = math.nan
    for preset in PRESETS:
        here, dead = group_advantage(flat, cu, preset=preset)
        there, dead_there = group_advantage(flat.cuda(), cu.cuda(), preset=preset)
        assert torch.equal(dead, dead_there.cpu())
        torch.testing.assert_close(there.cpu(), here, rtol=2**-23, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "grpo"}, "preset must be one of trl, verl, fastrl, rloo, dr_grpo, not 'grpo'"),
        ({"rewards": torch.zeros(4, dtype=torch.int64)}, "rewards must be [N] float32 or float64, not [4] torch.int64"),
        ({"rewards": torch.tensor([0, 1, math.inf, 0])}, "reward 2 is infinite"),
        ({"cu_group_sizes": torch.tensor([0, 4], dtype=torch.int32)}, "cu_group_sizes must be [G + 1] int64"),
        ({"cu_group_sizes": torch.tensor([], dtype=torch.int64)}, "cu_group_sizes must be [G + 1] int64"),
        ({"cu_group_sizes": torch.tensor([1, 4])}, "cu_group_sizes must start with 0"),
        ({"cu_group_sizes": torch.tensor([0, 3, 2, 4])}, "cu_group_sizes must not decrease, but does after index 1"),
        ({"cu_group_sizes": torch.tensor([0, 5])}, "cu_group_sizes must end with 4, not 5"),
    ],
)
def test_what_is_refused(change, message):
    arguments = {"rewards": torch.zeros(4), "cu_group_sizes": torch.tensor([0, 4]), **change}
    with pytest.raises(ValueError) as caught:
        group_advantage(arguments.pop("rewards"), arguments.pop("cu_group_sizes"), **arguments)
    assert message in str(caught.value)
