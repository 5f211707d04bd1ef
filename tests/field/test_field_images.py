"""Public bug reports about models that read images, each on its smallest input."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from test_vision_model import IDS, TOKENIZER, drawing, images, prompts  # noqa: F401, the fixture is used by its name
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from fastrl_fast.advantage import assign_advantages
from fastrl_fast.builtin import tiny_vlm
from fastrl_fast.config import DataConfig, ModelConfig, PruneConfig
from fastrl_fast.data import PromptData
from fastrl_fast.microbatches import plan_microbatches
from fastrl_fast.model import save_pretrained
from fastrl_fast.packing import ModelShape, pack, to_train_group
from fastrl_fast.prune import prune
from fastrl_fast.types import Group, Rollout
from fastrl_fast.vision import load_images


def test_C09_an_exported_model_has_all_that_reads_its_images(tmp_path) -> None:
    source, out = tmp_path / "model", tmp_path / "export"
    source.mkdir()
    tiny_vlm.write(source)
    settings = ModelConfig(path=str(source))
    lm = tiny_vlm.build(TOKENIZER)
    save_pretrained(str(source), dict(lm.named_parameters()), out, settings)
    # The whole processor reads videos too, with torchvision.
    videos = importlib.util.find_spec("torchvision") is not None
    read = AutoProcessor.from_pretrained(out).image_processor if videos else AutoImageProcessor.from_pretrained(out)
    assert read.patch_size == 14 and (out / "preprocessor_config.json").stat().st_size > 0
    assert AutoTokenizer.from_pretrained(out).get_vocab() == TOKENIZER.get_vocab()
    assert load_images(str(out), TOKENIZER, ModelConfig(path=str(out)), DataConfig(path="none")) is not None


def test_V12_placeholders_are_expanded_once(images) -> None:  # noqa: F811
    asked = TOKENIZER(f"{images.placeholder}Find x.")["input_ids"]
    placed, pictures = images.place(asked, [drawing(80, 60)])
    grid = images.pixel_values(pictures).shape[0]
    assert placed.count(IDS["image"]) == pictures[0].tokens == grid // 4
    assert len(placed) == len(asked) - 1 + pictures[0].tokens
    with pytest.raises(ValueError, match=f"has 1 images, and {pictures[0].tokens} image tokens"):
        images.place(placed, [drawing(80, 60)])


@pytest.mark.parametrize("damaged", [drawing(90, 90)[:100], b"", b"GIF89a", drawing(9, 9)[:-20], drawing(900, 2)])
def test_D06_a_damaged_image_costs_its_row_and_is_told(damaged: bytes, tmp_path) -> None:
    rows = {"id": ["a", "b", "c"], "problem": ["Find x."] * 3, "images": [[drawing(60, 60)], [damaged], []]}
    with pytest.warns(UserWarning, match=r"^1 of 3 rows are left out: .*row 2 of .*column 'images'.*\(id b\)$"):
        data = image_data(rows, tmp_path)
    assert [prompt.id for prompt in data.first(3)] == ["a", "c"]
    assert data.dropped_unreadable == 1


def test_D06_a_column_that_holds_no_images_is_an_error(tmp_path) -> None:
    rows = {"problem": ["Find x."] * 3, "images": [[drawing(60, 60)], [b"no"], [b"no"]]}
    with pytest.raises(ValueError, match=r"row 2 of .*column 'images'.* is no readable image.* 2 of 3 rows"):
        image_data(rows, tmp_path)


def image_data(rows: dict[str, list[Any]], folder: Path) -> PromptData:
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "d.parquet")
    tiny_vlm.write(folder)
    config = DataConfig(path=str(folder / "d.parquet"), prompts_per_step=1)
    reader = load_images(str(folder), TOKENIZER, ModelConfig(path=str(folder)), config)
    return PromptData(config, TOKENIZER, seed=0, images=reader)


def test_M06_each_row_keeps_its_own_images(images) -> None:  # noqa: F811
    """One image, two and none, pruned, shuffled over ranks and cut into micro-batches."""
    groups = []
    for number, prompt in enumerate(prompts(images)):
        rollouts = [Rollout([40 + i, 60 + number], [-1.0] * 2, "stop", reward=float(i % 2)) for i in range(4)]
        groups.append(Group(prompt, rollouts, number=number))
    random.Random(0).shuffle(groups)
    assign_advantages(groups, preset="fastrl")
    prune(groups, PruneConfig(method="random"), kl=False)
    for shared in (0, 10**6):
        trained = [s for group in groups for s in to_train_group(group, longest_shared=shared).sequences]
        assert len(trained) == 8
        shape = ModelShape(parameters=1000, layers=2, hidden=16)
        for room in (1, 60, 10**6):
            plans = plan_microbatches(trained, ranks=2, tokens_per_microbatch=room, shape=shape)
            for members in (members for plan in plans for members in plan):
                rows = [trained[i] for i in members]
                batch = pack(rows, images.pixel_values)
                laid = torch.zeros(len(batch.input_ids), dtype=torch.bool)
                for picture in batch.pictures:
                    laid[picture.start : picture.start + picture.tokens] = True
                assert torch.equal(laid, batch.input_ids == IDS["image"]), "every image lies on its own tokens"
                assert {p.data for p in batch.pictures} == {p.data for row in rows for p in row.pictures}
                if batch.pictures:
                    alone = torch.cat([images.pixel_values([p]) for p in batch.pictures])
                    assert torch.equal(batch.pixel_values, alone)
                    assert batch.image_grid_thw.tolist() == [list(p.grid) for p in batch.pictures]
