"""What images cost: FLOPs of every kind of tower as PyTorch counts them, and what it keeps for the backward pass."""

import math
from dataclasses import replace

import pytest
import torch
from test_vision_model import FAMILIES, make_vlm
from torch.utils.flop_counter import FlopCounterMode

from fastrl_fast import cli
from fastrl_fast.config import Config, DataConfig, LossConfig, ModelConfig, UpdatesConfig
from fastrl_fast.dry_run import _lines
from fastrl_fast.memory import ModelSize, estimate_memory
from fastrl_fast.packing import ModelShape, microbatch_flops, microbatch_tower_flops, to_train_group
from fastrl_fast.plan import Plan
from fastrl_fast.savings import Passes, flop_sums
from fastrl_fast.tower import TowerShape
from fastrl_fast.types import Group, Picture, Prompt, Rollout
from fastrl_fast.vision import read_tower

GRIDS = [(1, 2, 2), (1, 6, 6), (1, 8, 18), (1, 20, 10)]
"""One token, less than a window, windows cut off at one side and at the other."""


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_pytorch_counts(family: str) -> None:
    lm = make_vlm(family)
    lm.set_attn_implementation("eager")
    tower = lm.base_model.visual
    shape = TowerShape.of(tower, lm.config.vision_config)
    for grid in GRIDS:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.randn(math.prod(grid), shape.patch_values), grid_thw=torch.tensor([grid]))
        assert shape.forward_flops(grid) == counter.get_total_flops(), grid


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_read_from_a_configuration_alone(family: str) -> None:
    lm = make_vlm(family)
    shape = TowerShape.of(lm.base_model.visual, lm.config.vision_config)
    assert read_tower(lm.config) == shape
    assert ModelSize.of(lm.config, shape).parameters == pytest.approx(lm.num_parameters(), rel=0.005), "but for biases"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_what_autograd_saves(family: str, dtype: torch.dtype) -> None:
    """Within 2 %; saved means and tables of angles are left out."""
    lm = make_vlm(family, dtype)
    lm.set_attn_implementation("sdpa")
    tower, width = lm.base_model.visual, dtype.itemsize
    shape, blocks = TowerShape.of(tower, lm.config.vision_config), tower.blocks
    own = {p.untyped_storage().data_ptr() for p in tower.parameters()}

    def saved(depth: int) -> float:
        """Bytes per patch with so many layers."""
        tower.blocks = blocks[:depth]
        kept: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            seen = tower(torch.randn(128, shape.patch_values), grid_thw=torch.tensor([[1, 8, 16]]))
        assert seen is not None
        return sum(storage.nbytes() for storage in kept.values()) / 128

    layer = saved(shape.layers) - saved(shape.layers - 1)
    one, two = (replace(shape, layers=n).activation_bytes(width, checkpointing=False) for n in (1, 2))
    assert layer == pytest.approx(two - one, rel=0.02)


PICTURE = Picture(b"", (1, 4, 4), 2, 1)
PROMPT = Prompt("a", [1] * 10, "look", {}, (PICTURE, PICTURE))
TOWER = TowerShape(
    parameters=90,
    patch_weights=40,
    token_weights=20,
    patch_values=8,
    layers=2,
    full_layers=2,
    hidden=3,
    intermediate=5,
    gated=True,
    kept=4,
    window=0,
    merge=2,
)
SHAPE = ModelShape(parameters=1000, layers=0, hidden=16, tower=TOWER)
IMAGES = 2 * (2 * (40 * 16 + 20 * 4) + 4 * 3 * 2 * 16**2)
"""FLOPs of both images of the prompt."""


def rollout(tokens: int, reason: str = "") -> Rollout:
    return Rollout([1] * tokens, [-1.0] * tokens, "stop", drop_reason=reason)


@pytest.mark.parametrize("frozen", [False, True])
def test_images_are_charged_once_per_prompt_laid_down(frozen: bool) -> None:
    """Shared by two of three rollouts: sampled once, trained once; apart each of the two would have read them. A frozen
    tower has no backward pass."""
    config = Config(
        model=ModelConfig(path="m", freeze_vision=frozen), data=DataConfig(path="d"), loss=LossConfig(kl_coef=0.1)
    )
    passes = Passes.of(config, updates=1)
    groups = [Group(PROMPT, [rollout(4), rollout(6), rollout(5, "similar")])]
    for longest, times in ((math.inf, 1), (0, 2)):
        sequences = to_train_group(groups[0], longest_shared=longest).sequences
        forward, tower = microbatch_flops(sequences, SHAPE), microbatch_tower_flops(sequences, SHAPE)
        assert tower == times * IMAGES and forward == 2000 * (times * 10 + 10) + tower
        sums = flop_sums(groups, SHAPE, passes, forward=forward, tower=tower, longest_shared=longest)
        trained = 1 if frozen else 3
        assert sums["flops/generation"] == 2000 * (10 + 15) + IMAGES
        assert sums["flops/reference"] == forward
        assert sums["flops/update"] == 6000 * (times * 10 + 10) + trained * tower
        assert sums["flops_shared/update"] == (2 - times) * (6000 * 10 + trained * IMAGES)
        # The dropped one would have shared the prompt, or had one of its own.
        assert sums["flops_saved/update"] == 6000 * 5 + (times - 1) * (6000 * 10 + trained * IMAGES)


def test_memory_of_images_by_hand() -> None:
    size = ModelSize(layers=3, hidden=8, intermediate=16, queries=8, keys=4, vocabulary=100, tied=False)
    config = Config(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), updates=UpdatesConfig(tokens_per_microbatch=10)
    )
    frozen = replace(config, model=replace(config.model, freeze_vision=True))
    plain = estimate_memory(size, config, ranks=1)
    seeing = replace(size, tower=TOWER)
    ours, still = (estimate_memory(seeing, c, ranks=1, patches=7, step_patches=50) for c in (config, frozen))
    layer = 2 * 3 * (4 + 8) + 4 * (7 * 3 + 4 * 5)
    assert ours.images == 4 * 8 * 50 + 7 * (2 * layer + 8 * 4 + 3 * (4 + 16))
    assert still.images == 4 * 8 * 50
    assert ours.parameters == still.parameters == plain.parameters + 4 * 90
    assert (ours.optimizer, still.optimizer) == (plain.optimizer + 8 * 90, plain.optimizer)
    assert (ours.gradients, still.gradients) == (plain.gradients + 4 * 90, plain.gradients)
    assert ours.update == plain.update + 4 * 90 + ours.images


def test_the_plan_counts_images() -> None:
    """Sampled, then trained on: a forward pass and three."""
    arguments = ["--config=shapes", "--data.path=shapes:train?size=32", "--eval.path=null"]
    plan = Plan.read(cli.parse(arguments, prog="train")[0])
    rows = dict(_lines(plan, "shapes"))
    tower = plan.size.tower
    assert tower is not None
    assert rows["vision tower"] == f"{tower.parameters / 1e6:.2f}M of them, 2 layers, trained"
    assert rows["tokens per image"] == "9 to 9, 9.0 on average"
    phases, images = plan.flops()
    assert images == pytest.approx(16 * 4 * tower.forward_flops((1, 6, 6)))
    assert sorted(name for name, value in phases.items() if value) == ["generation", "update"]
    share = rows["TFLOP per step"].rpartition("; ")[2]
    assert share == f"{images / sum(phases.values()):.1%} in the vision tower"
    pixels = 16 * 36 * 1176 * 4
    one = tower.activation_bytes(4, checkpointing=False)
    assert plan.memory(1).images == pytest.approx(pixels + 16 * 36 * one), "a step has less than 16,384 tokens"
    updates = replace(plan.config.updates, tokens_per_microbatch=1000)
    few = replace(plan, config=replace(plan.config, updates=updates))
    prompt = sum(len(prompt.token_ids) for prompt in plan.prompts) / 32
    assert few.memory(1).images == pytest.approx(pixels + 1000 / (prompt + 8 * 32) * 36 * one)
