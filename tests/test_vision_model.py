"""Packed rows with images against stock Qwen-VL models that read one sequence at a time."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fastrl_fast.builtin import tiny_vlm
from fastrl_fast.config import DataConfig, ModelConfig, RolloutConfig
from fastrl_fast.model import build_policy, frozen_copy, sampler_copy
from fastrl_fast.packing import Sequence, pack
from fastrl_fast.rollout import build_sampler
from fastrl_fast.sharing_check import SharingCheck
from fastrl_fast.types import Prompt
from fastrl_fast.vision import QwenImages, barred_tokens, load_images

SETTINGS = ModelConfig(path="none")
TOKENIZER = tiny_vlm.byte_tokenizer()
IDS = tiny_vlm.vision_ids(TOKENIZER)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def make_vlm(family: str = "qwen2_5_vl", dtype: torch.dtype = torch.float32):
    """A stock model with random weights, wide enough that mistakes show."""
    torch.manual_seed(0)
    special = {f"{name}_token_id": token for name, token in IDS.items()}
    if family == "qwen2_5_vl":
        lm = tiny_vlm.build(TOKENIZER)
    else:
        rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 4, 4])
        text = tiny_vlm.SIZES | dict(vocab_size=len(TOKENIZER), rope_parameters=rope, tie_word_embeddings=True)
        if family == "qwen2_vl":
            vision = dict(depth=2, embed_dim=64, hidden_size=96, num_heads=4, mlp_ratio=2)
            config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
            lm = Qwen2VLForConditionalGeneration(config)
        else:
            vision = dict(depth=3, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=96)
            vision |= dict(patch_size=14, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
            text |= dict(head_dim=24)
            config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
            lm = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return lm.to(dtype).eval()


def drawing(width: int, height: int, colour: str = "red") -> bytes:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse([width // 8, height // 6, width // 2, height // 2], outline=colour, width=3)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> QwenImages:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_vlm.write(folder)
    reader = load_images(str(folder), TOKENIZER, SETTINGS, DataConfig(path="none", max_pixels=28 * 28 * 12))
    assert isinstance(reader, QwenImages)
    return reader


def prompts(images: QwenImages) -> list[Prompt]:
    """With one image, two of different shapes, none, and one that ends with its image."""
    asked = [
        (f"{images.placeholder}Find x.", [drawing(80, 60)]),
        (f"Is {images.placeholder} above {images.placeholder}?", [drawing(40, 150, "blue"), drawing(70, 70)]),
        ("How much is two and two?", []),
        (f"See {images.placeholder}", [drawing(200, 30, "green")]),
    ]
    made = []
    for number, (text, files) in enumerate(asked):
        tokens, pictures = images.place(TOKENIZER(text)["input_ids"], files)
        made.append(Prompt(str(number), tokens, text, {}, pictures))
    return made


def sequences(prompts: list[Prompt], *, share: bool) -> list[Sequence]:
    """The groups' rollouts as pruning leaves them: three, two, two and a single one."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, (prompt, lengths) in enumerate(zip(prompts, [(5, 17, 1), (9, 3), (4, 4), (7,)], strict=True)):
        for n in lengths:
            completion = torch.randint(256, (n,), generator=generator).tolist()
            group = number if share else None
            made.append(Sequence(prompt.token_ids, completion, [0.0] * n, 1.0, 1.0, group, pictures=prompt.pictures))
    return made


def alone(lm, images: QwenImages, sequence: Sequence) -> torch.Tensor:
    """Logprobs of one completion as transformers itself computes them, positions included, over what can be sampled."""
    tokens = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
    seen = {}
    if sequence.pictures:
        pixels, grids = images.pixel_values(sequence.pictures), torch.tensor([p.grid for p in sequence.pictures])
        seen = dict(pixel_values=pixels.to(lm.dtype), image_grid_thw=grids)
        seen["mm_token_type_ids"] = (tokens == IDS["image"]).int()
    logits = lm(input_ids=tokens, use_cache=False, **seen).logits[0, len(sequence.prompt_ids) - 1 : -1]
    logits[:, barred_tokens(lm.config)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence.completion_ids)[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_equal_each_sequence_alone(images, family, share, dtype):
    """K01, M06: one, two and no images in one row; logprobs, and gradients of tower and language model.

    Rotary angles and some norms are float32 in models of any dtype, which bounds what gradients in float64 can show.
    """
    lm = make_vlm(family, dtype)
    policy = build_policy(copy.deepcopy(lm), SETTINGS, temperature=1.0)
    rollouts = sequences(prompts(images), share=share)
    batch = pack(rollouts, images.pixel_values)
    assert len(batch.prefixes) == (3 if share else 0)
    assert len(batch.pictures) == (4 if share else 3 + 2 * 2 + 1), "once for each prompt that is laid down"
    expected = torch.cat([alone(lm, images, s) for s in rollouts])
    logprobs, _ = policy(batch)
    tight = dtype == torch.float64
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-11 if tight else 2e-6)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    (expected * upstream).sum().backward()
    (logprobs * upstream).sum().backward()
    theirs = dict(lm.named_parameters())
    assert any("visual" in name for name in theirs)
    for name, parameter in policy.lm.named_parameters():
        apart = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm()
        assert apart <= (1e-6 if tight else 1e-4), name


def test_the_images_are_seen(images):
    """Guards the test above: with another image the logprobs of its group alone are others."""
    policy = build_policy(make_vlm(), SETTINGS, temperature=1.0)
    asked = prompts(images)
    before = policy(pack(sequences(asked, share=True), images.pixel_values))[0]
    other = drawing(80, 60, "black")
    asked[0] = replace(asked[0], pictures=(replace(asked[0].pictures[0], data=other),))
    after = policy(pack(sequences(asked, share=True), images.pixel_values))[0]
    changed = (before - after).abs() > 1e-4
    assert changed[:23].any() and not changed[23:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_images_use_the_same_weights(images, family):
    """A rank whose micro-batch has no image gathers and reduces the tower like the others: every weight has a gradient,
    the tower's of zero."""
    policy = build_policy(make_vlm(family), SETTINGS, temperature=1.0)
    text = [s for s in sequences(prompts(images), share=True) if not s.pictures]
    for rollouts in (text, []):
        policy.zero_grad()
        policy(pack(rollouts))[0].sum().backward()
        assert all(p.grad is not None for p in policy.parameters())
        assert not any(p.grad.any() for p in policy.tower.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_and_the_rest_learns_as_before(images, family):
    rollouts, gradients = sequences(prompts(images), share=True), []
    for freeze in (False, True):
        policy = build_policy(make_vlm(family), replace(SETTINGS, freeze_vision=freeze), temperature=1.0)
        policy(pack(rollouts, images.pixel_values))[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.lm.named_parameters()})
    for name, trained in gradients[0].items():
        if ".visual." in name:
            assert gradients[1][name] is None and trained.any(), name
        else:
            torch.testing.assert_close(gradients[1][name], trained, rtol=1e-5, atol=1e-6, msg=name)


def test_activation_checkpointing_changes_no_gradient(images):
    gradients = []
    for checkpointing in (False, True):
        settings = replace(SETTINGS, activation_checkpointing=checkpointing)
        policy = build_policy(make_vlm(), settings, temperature=1.0)
        policy(pack(sequences(prompts(images), share=True), images.pixel_values))[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_shard_units_are_the_layers_of_both_parts(family):
    """The last is the language model's last layer, whose weights the backward pass needs first."""
    policy = build_policy(make_vlm(family), SETTINGS, temperature=1.0)
    assert policy.shard_units == [*policy.tower.blocks, *policy.decoder.language_model.layers]


def test_the_check_of_shared_prompts_takes_images_along(images, process_group):
    policy = build_policy(make_vlm(), SETTINGS, temperature=1.0)
    batch = pack(sequences(prompts(images), share=True), images.pixel_values)
    SharingCheck("float32").run(policy, [batch])
    batch.position_ids[1, batch.prefixes[0, 0] : batch.prefixes[0, 1]] += 3
    with pytest.raises(ValueError, match=r"updates\.share_prompts"):
        SharingCheck("float32").run(policy, [batch])


def sampler(lm, images, **settings):
    config = RolloutConfig(max_completion_tokens=12, **settings)
    copied = sampler_copy(lm, dtype=torch.float32, device=torch.device("cpu"))
    return build_sampler(config, copied, TOKENIZER, images=images, barred=barred_tokens(lm.config))


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_those_of_training_and_of_stock_models(images, family):
    """A whole step's prompts in one decode batch: lengths, images and ends differ; pruned groups are packed again."""
    lm = make_vlm(family)
    groups = sampler(lm, images).sample(prompts(images), [3, 2, 2, 1], seed=0, step=0)
    rollouts = [
        Sequence(g.prompt.token_ids, r.completion_ids, r.rollout_logprobs, 1.0, 1.0, n, g.prompt.pictures)
        for n, g in enumerate(groups)
        for r in g.rollouts[: 2 if n == 0 else None]
    ]
    batch = pack(rollouts, images.pixel_values)
    with torch.no_grad():
        expected = torch.cat([alone(lm, images, s) for s in rollouts])
        logprobs, _ = build_policy(copy.deepcopy(lm), SETTINGS, temperature=1.0)(batch)
    torch.testing.assert_close(batch.rollout_logprobs, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


def test_completions_hold_no_image_tokens(images):
    """M04: a model that wants nothing but them; the probabilities of all others still sum to one, in training too."""
    lm = make_vlm()
    barred = barred_tokens(lm.config)
    assert len(barred) == 4
    with torch.no_grad():
        lm.lm_head.weight[barred] += 20 * torch.randn(96, generator=torch.Generator().manual_seed(3))
    groups = sampler(lm, images).sample(prompts(images), [8] * 4, seed=0, step=0)
    assert not {t for g in groups for r in g.rollouts for t in r.completion_ids} & set(barred)
    policy = build_policy(lm, SETTINGS, temperature=0.7)
    prompt = prompts(images)[0]
    others = [token for token in range(len(TOKENIZER)) if token not in barred]
    every = [Sequence(prompt.token_ids, [token], [0.0], 1.0, 1.0, 0, prompt.pictures) for token in others]
    logprobs, entropy = policy(pack(every, images.pixel_values))
    assert float(logprobs.detach().exp().sum()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(entropy[0], -(logprobs.exp() * logprobs).sum(), rtol=1e-4, atol=1e-4)
    (logprobs.square().sum() + entropy.sum()).backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


def test_the_reference_copy_reads_images_too(images):
    policy = build_policy(make_vlm(), SETTINGS, temperature=1.0)
    batch = pack(sequences(prompts(images), share=True), images.pixel_values)
    assert torch.equal(frozen_copy(policy)(batch)[0], policy(batch)[0].detach())
