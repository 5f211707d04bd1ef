"""Images of data rows: every form and every kind of file, and a clear error for each that cannot be read."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from fastrl_fast.builtin import tiny_vlm
from fastrl_fast.config import DataConfig, ModelConfig
from fastrl_fast.data import PromptData
from fastrl_fast.positions import going_on, prompt_positions
from fastrl_fast.vision import QwenImages, decode, load_images

TOKENIZER = tiny_vlm.byte_tokenizer()
IDS = tiny_vlm.vision_ids(TOKENIZER)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_vlm.write(folder)
    return str(folder)


def reader(folder: str, **data: int) -> QwenImages:
    images = load_images(folder, TOKENIZER, ModelConfig(path=folder), DataConfig(path="none", **data))
    assert isinstance(images, QwenImages)
    return images


def file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def square(mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Left half red, right half blue, as far as the mode has colours."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (size[0] // 2, 0, size[0], size[1]))
    return image.convert(mode)


def half(image: Image.Image, side: int) -> tuple[int, int, int]:
    """The colour in the middle of the left (0) or right (1) half."""
    return image.getpixel((image.width // 4 + side * image.width // 2, image.height // 2))


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
def test_colours_survive_every_mode(mode):
    """M02; CMYK through JPEG, with what that loses."""
    decoded = decode(
        file(square(mode), "JPEG" if mode == "CMYK" else "PNG", **({"quality": 95} if mode == "CMYK" else {}))
    )
    assert decoded.mode == "RGB" and decoded.size == (60, 40)
    for side, colour in enumerate([(255, 0, 0), (0, 0, 255)]):
        assert all(abs(a - b) <= 6 for a, b in zip(half(decoded, side), colour, strict=True))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "I"])
def test_grey_images_are_the_same_grey_in_every_mode(mode):
    """M02: of 16 bits the upper eight count; Pillow's own conversion cuts them off at 255."""
    level = 255 if mode == "1" else 128
    value = {"LA": (level, 255), "I;16": level * 257, "I": level * 257}.get(mode, level)
    image = Image.new(mode, (5, 3), value)
    assert decode(file(image, "TIFF" if mode == "I" else "PNG")).getpixel((2, 1)) == (level,) * 3


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert decode(file(clear)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(file(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert decode(file(Image.new("RGBA", (4, 4), (0, 0, 0, 127)))).getpixel((0, 0)) == (128, 128, 128)


def test_a_rotated_photograph_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the upper side of the picture is at its right
    turned = decode(file(square(), "PNG", exif=exif))
    assert turned.size == (40, 60)
    assert turned.getpixel((20, 10)) == (255, 0, 0) and turned.getpixel((20, 50)) == (0, 0, 255)


@pytest.mark.parametrize(
    "data",
    [b"", b"no image at all", file(square())[:100], file(square(), "JPEG")[:200], file(square(), "GIF")[:20]],
    ids=["empty", "text", "cut png", "cut jpeg", "cut gif"],
)
def test_broken_files_are_refused(data):
    with pytest.raises(ValueError, match=f"is no readable image \\({len(data)} bytes\\)"):
        decode(data)


def test_a_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="decompression bomb"):
        decode(file(square()))


def test_floating_point_pixels_are_refused():
    with pytest.raises(ValueError, match="floating-point"):
        decode(file(Image.new("F", (3, 3), 0.5), "TIFF"))


# ---- sizes and tokens -------------------------------------------------------------------------------------------

SIZES = [(1, 1), (28, 28), (14, 42), (42, 14), (70, 70), (199, 1), (1, 199), (333, 77), (1000, 20), (2000, 1500)]


@pytest.mark.parametrize("limits", [{}, {"min_pixels": 10_000, "max_pixels": 20_000}, {"max_pixels": 784}])
def test_an_image_takes_the_patches_that_the_processor_makes(model_folder, limits):
    """Tokens are counted from an image's size alone, before anything is resized; 1 x 1 and extreme shapes too."""
    images = reader(model_folder, **limits)
    files = [file(square(size=size)) for size in SIZES]
    tokens, pictures = images.place([7, *[IDS["image"]] * len(files), 8], files)
    assert len(images.pixel_values(pictures)) == sum(picture.patches for picture in pictures)  # the grids are compared
    assert tokens.count(IDS["image"]) == sum(picture.tokens for picture in pictures)
    assert all(tokens[p.start : p.start + p.tokens] == [IDS["image"]] * p.tokens for p in pictures)
    assert tokens[0] == 7 and tokens[-1] == 8


def test_an_image_too_long_for_its_width_is_refused(model_folder):
    with pytest.raises(ValueError, match="201 x 1, longer than 200 times"):
        reader(model_folder).place([IDS["image"]], [file(square(size=(201, 1)))])


def test_pixels_are_those_of_the_picture(model_folder):
    """A 28 x 28 image is one token of four patches; values are (x - mean) / std, red first, two equal frames."""
    images = reader(model_folder, min_pixels=784)
    _, pictures = images.place([IDS["image"]], [file(square(size=(28, 28)))])
    pixels = images.pixel_values(pictures).view(2, 2, 3, 2, 14, 14)
    assert pictures[0].grid == (1, 2, 2) and pictures[0].tokens == 1
    red, blue = (torch.tensor([2.0, -2.0, -2.0]), torch.tensor([-2.0, -2.0, 2.0]))
    assert torch.equal(pixels, torch.stack([red, blue])[None, :, :, None, None, None].expand(2, 2, 3, 2, 14, 14))


def test_positions_are_those_of_the_model(model_folder):
    images = reader(model_folder)
    lm = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    for count in (0, 1, 2, 3):
        files = [file(square(size=size)) for size in [(100, 60), (30, 200), (90, 90)][:count]]
        text = [5, 6, *[n for _ in files for n in (IDS["image"], 9)]]
        for tokens in (text, text[2:] + text[:2], text[:-1]):
            placed, pictures = images.place(tokens, files)
            ids = torch.tensor([placed + [1, 2, 3]])
            grids = torch.tensor([p.grid for p in pictures]) if pictures else None
            expected, _ = lm.model.get_rope_index(ids, (ids == IDS["image"]).int(), image_grid_thw=grids)
            own = prompt_positions(len(placed), pictures)
            assert torch.equal(torch.cat([own, going_on(own, 3)], dim=1), expected[:, 0])


# ---- rows -------------------------------------------------------------------------------------------------------


def prompts(folder: str, path: Path, **settings: object) -> list:
    config = DataConfig(path=str(path), prompts_per_step=1, **settings)
    images = load_images(folder, TOKENIZER, ModelConfig(path=folder), config)
    data = PromptData(config, TOKENIZER, seed=0, images=images)
    return data.first(len(data))


def parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


RED = file(square())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([RED]),
        pa.array([[RED]]),
        pa.array([{"bytes": RED, "path": "x.png"}]),
        pa.array([[{"bytes": RED, "path": None}]]),
        pa.array([{"bytes": None, "path": "red.png"}]),
        pa.array([["red.png"]]),
    ],
    ids=["bytes", "list of bytes", "struct", "list of structs", "struct of a path", "list of paths"],
)
def test_every_form_of_an_image_is_read(model_folder, tmp_path, column):
    """D01, D02; relative paths lie beside the data, or in data.image_dir."""
    (tmp_path / "red.png").write_bytes(RED)
    path = parquet(tmp_path / "data.parquet", image=column, problem=["<image>Find x."], answer=["1"])
    (prompt,) = prompts(model_folder, path)
    assert [picture.data for picture in prompt.pictures] == [RED]
    assert prompt.text == "<image>Find x." and prompt.columns == {"answer": "1"}


def test_paths_of_json_lines_lie_in_the_image_folder(model_folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "red.png").write_bytes(RED)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "Find x.", "image": "red.png", "answer": 1}))
    (prompt,) = prompts(model_folder, path, image_dir=str(tmp_path / "elsewhere"))
    assert prompt.pictures[0].data == RED
    with pytest.raises(ValueError, match=r"row 1 of .*column 'image' names 'red.png'.*data\.image_dir"):
        prompts(model_folder, path)


def test_pil_images_keep_their_pixels_and_their_names(model_folder, monkeypatch, tmp_path):
    rows = [{"problem": "Find x.", "image": square(mode), "answer": "1"} for mode in ("RGB", "CMYK", "I;16")]
    monkeypatch.setattr("fastrl_fast.data.prompt_data.load_rows", lambda *args, **kwargs: rows)
    made = prompts(model_folder, tmp_path / "none.jsonl")
    assert half(decode(made[0].pictures[0].data), 0) == half(decode(made[1].pictures[0].data), 0) == (255, 0, 0)
    rows[0]["image"] = square("RGB")
    assert [p.id for p in prompts(model_folder, tmp_path / "none.jsonl")] == [p.id for p in made]


def test_images_stand_where_the_question_has_them(model_folder, tmp_path):
    blue = file(square(size=(30, 90)))
    pictures = pa.array([[RED, blue], [RED, blue], [], None])
    asked = ["Is <image> above <image>?", "Compare them.", "How much is 2 + 2?", "And 3 + 3?"]
    two, before, none, missing = prompts(model_folder, parquet(tmp_path / "d.parquet", images=pictures, problem=asked))
    text = TOKENIZER.decode(two.token_ids).replace("<|image_pad|>", "")
    assert "Is <|vision_start|><|vision_end|> above <|vision_start|><|vision_end|>?" in text
    text = TOKENIZER.decode(before.token_ids).replace("<|image_pad|>", "")
    assert "user\n" + "<|vision_start|><|vision_end|>" * 2 + "Compare them." in text
    assert [p.data for p in two.pictures] == [p.data for p in before.pictures] == [RED, blue]
    assert none.pictures == missing.pictures == ()


@pytest.mark.parametrize(
    ("images", "asked", "message"),
    [
        ([RED], "<image> and <image>?", r"column 'problem' has 2 <image> for 1 images"),
        ([RED, RED], "Find <image>.", r"column 'problem' has 1 <image> for 2 images"),
        ([], "Find <image>.", r"column 'problem' has 1 <image> for 0 images"),
        ([RED], "Find <|image_pad|>.", r"column 'images' has 1 images, and 2 image tokens in its text"),
    ],
)
def test_a_row_that_does_not_fit_is_named(model_folder, tmp_path, images, asked, message):
    columns = dict(images=pa.array([[RED], images], pa.list_(pa.binary())), problem=["<image>Find x.", asked])
    with pytest.raises(ValueError, match=rf"^data\.path: row 2 of .*: {message}"):
        prompts(model_folder, parquet(tmp_path / "data.parquet", **columns))


def test_a_number_is_no_image(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"row 1 .*column 'image' must hold bytes, paths"):
        prompts(model_folder, parquet(tmp_path / "data.parquet", image=[3], problem=["Find x."]))


def test_a_model_that_reads_no_images_says_so(tmp_path):
    path = parquet(tmp_path / "data.parquet", images=pa.array([[RED]]), problem=["<image>Find x."])
    with pytest.raises(ValueError, match=r"row 1 .*column 'images' holds images, which the model at model\.path"):
        PromptData(DataConfig(path=str(path), prompts_per_step=1), TOKENIZER, seed=0)


def test_a_prompt_too_long_for_its_images_is_left_out_whole(model_folder, tmp_path):
    """M03: never cut inside an image."""
    columns = dict(images=pa.array([[RED], [file(square(size=(200, 200)))]]), problem=["Find x.", "Find y."])
    path = parquet(tmp_path / "data.parquet", **columns)
    (kept,) = prompts(model_folder, path, max_prompt_tokens=60)
    assert kept.text == "Find x." and kept.token_ids.count(IDS["image"]) == kept.pictures[0].tokens


def test_areas_are_checked():
    with pytest.raises(ValueError, match=r"data\.max_pixels must be at least data\.min_pixels \(200\), got 100"):
        DataConfig(path="none", min_pixels=200, max_pixels=100)
    with pytest.raises(ValueError, match=r"data\.min_pixels must be"):
        DataConfig(path="none", min_pixels=0)
