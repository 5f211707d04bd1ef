"""AdamW against its formula, and the learning rate as a function of the step."""

import math

import pytest
import torch

from fastrl_fast.config import OptimizerConfig
from fastrl_fast.optimizer import build_optimizer, learning_rate


def rates(total: int = 10, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=2.0, **settings)
    return [learning_rate(config, step=i, total_steps=total) for i in range(total)]


def test_constant():
    assert rates() == [2.0] * 10


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule):
    values = rates(schedule=schedule, warmup_steps=4)
    assert values[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert max(values) == 2.0 and all(v > 0 for v in values), "no step is wasted on a rate of zero"


def test_linear_falls_by_equal_parts_to_where_the_next_would_be_zero():
    assert rates(schedule="linear", warmup_steps=2) == pytest.approx([1.0, 2.0, *(2 * (8 - i) / 8 for i in range(8))])


def test_cosine_is_half_a_cosine():
    expected = [1 + math.cos(math.pi * i / 10) for i in range(10)]
    assert rates(schedule="cosine") == pytest.approx(expected)


def test_warm_up_longer_than_the_run():
    assert rates(3, warmup_steps=4, schedule="linear") == pytest.approx([0.5, 1.0, 1.5])
    assert rates(4, warmup_steps=4, schedule="cosine") == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_one_step():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(1, schedule=schedule) == [2.0]


def test_adamw_takes_the_settings():
    """Two steps by the formula of Loshchilov and Hutter (arXiv 1711.05101)."""
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, betas=(0.8, 0.95))
    parameter = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
    optimizer = build_optimizer([parameter], config)
    value, m, v = 1.5, 0.0, 0.0
    for step, gradient in enumerate((0.7, -0.2), start=1):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        update = (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
        value = value * (1 - 0.1 * 0.3) - 0.1 * update
        assert float(parameter.detach()) == pytest.approx(value, rel=1e-9)
