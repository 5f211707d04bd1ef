"""Images as models of the Qwen-VL family read them: files to upright RGB, placeholders to tokens, pixels to patches."""

import copy
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerBase

from .config import DataConfig, ModelConfig
from .tower import TowerShape
from .types import ImageReader, Picture, UnfitImage

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` of the models whose images can be read; they place tokens and rotary positions alike."""
MOST_ELONGATED = 200
"""Images longer than this many times their width are refused, as by the models' own processors."""


def barred_tokens(config: Any) -> list[int]:
    """Tokens that stand for images and videos and mark their borders: a completion that held one would speak of an
    image that is not there. Never sampled, and of probability 0 in training."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if config.model_type not in KINDS:
        return []
    return sorted({token for name in names if (token := getattr(config, name, None)) is not None})


def load_images(
    path: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig
) -> ImageReader | None:
    """The reader of the model at `path`; None for a model without one, whose data must have no images.

    Raises ValueError where the model reads images and its preprocessor_config.json cannot be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        if config.model_type not in KINDS:
            return None
        processor = _processor_class().from_pretrained(path)
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"model.path: cannot load the image processor of {model.path!r}: {message}") from error
    return QwenImages(processor, tokenizer, config, data)


def read_tower(config: Any) -> TowerShape | None:
    """The vision tower of a model of this configuration, without loading it; None for a model without one."""
    if config.model_type not in KINDS:
        return None
    config = copy.deepcopy(config)
    config.text_config.num_hidden_layers = 1
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:1]
    with torch.device("meta"):
        return TowerShape.of(AutoModelForImageTextToText.from_config(config).base_model.visual, config.vision_config)


def save_processor(path: str, out: Path) -> None:
    """Write what `load_images` needs of the model at `path`, if it reads images, beside its weights in `out`."""
    if AutoConfig.from_pretrained(path).model_type in KINDS:
        _processor_class().from_pretrained(path).save_pretrained(out)


def _processor_class() -> Any:
    """The one that works on PIL and numpy alone; transformers 4 has it under the name of the other."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    except ImportError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor
    return Qwen2VLImageProcessorPil


class QwenImages:
    """An `ImageReader` for Qwen2-VL, Qwen2.5-VL and Qwen3-VL; sizes are bounded by the model's own limits or, where
    given, data.min_pixels and data.max_pixels."""

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase, config: Any, data: DataConfig) -> None:
        vision = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
        self.placeholder = "".join(tokenizer.convert_ids_to_tokens(list(vision)))
        self._token = config.image_token_id
        self._processor = processor
        self._factor = processor.patch_size * processor.merge_size
        self._fewest, self._most = (processor.size[name] for name in ("shortest_edge", "longest_edge"))
        self._fewest = data.min_pixels or self._fewest
        self._most = data.max_pixels or self._most

    def place(self, token_ids: list[int], images: list[bytes]) -> tuple[list[int], tuple[Picture, ...]]:
        found = token_ids.count(self._token)
        if found != len(images):
            raise ValueError(f"has {len(images)} images, and {found} image tokens in its text")
        placed: list[int] = []
        pictures: list[Picture] = []
        for token in token_ids:
            if token != self._token:
                placed.append(token)
                continue
            data = images[len(pictures)]
            picture = Picture(data, self._grid(decode(data)), self._processor.merge_size, len(placed))
            pictures.append(picture)
            placed += [token] * picture.tokens
        return placed, tuple(pictures)

    def pixel_values(self, pictures: Sequence[Picture]) -> Tensor:
        size = {"shortest_edge": self._fewest, "longest_edge": self._most}
        images = [decode(picture.data) for picture in pictures]
        read = self._processor(images=images, size=size, return_tensors="pt")
        assert read["image_grid_thw"].tolist() == [list(picture.grid) for picture in pictures], "sizes were foreseen"
        return read["pixel_values"].to(torch.float32)

    def _grid(self, image: Image.Image) -> tuple[int, int, int]:
        """Patches of an image: sides rounded to whole tokens, then scaled into the limits of its area."""
        width, height = image.size
        if max(width, height) > MOST_ELONGATED * min(width, height):
            raise UnfitImage(f"is an image of {width} x {height}, longer than {MOST_ELONGATED} times its width")
        factor = self._factor
        sides = [round(side / factor) * factor for side in (height, width)]
        if math.prod(sides) > self._most:
            shrink = math.sqrt(height * width / self._most)
            sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
        elif math.prod(sides) < self._fewest:
            grow = math.sqrt(self._fewest / (height * width))
            sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
        rows, columns = (side // self._processor.patch_size for side in sides)
        return 1, rows, columns


def decode(data: bytes) -> Image.Image:
    """An image file as 8-bit RGB, upright as its EXIF data say, transparency over white, 16 bits scaled to 8.

    Raises UnfitImage for what is no image, is cut off, or has more pixels than Pillow takes for sane.
    """
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        upright = ImageOps.exif_transpose(image)
    except Exception as error:  # whatever Pillow's readers raise on foreign bytes
        what = " ".join(str(error).split())
        raise UnfitImage(f"is no readable image ({len(data)} bytes): {what}") from error
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        ground = Image.new("RGBA", upright.size, "white")
        return Image.alpha_composite(ground, upright).convert("RGB")
    if upright.mode.startswith("I"):
        values = np.asarray(upright).astype(np.int64)
        upright = Image.fromarray((np.clip(values, 0, 65535) // 257).astype(np.uint8))
    elif upright.mode == "F":
        raise ValueError("is an image of floating-point pixels, whose range is anyone's guess")
    return upright.convert("RGB")
