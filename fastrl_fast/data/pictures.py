"""The images of a row, in whatever form it holds them, and their places in its question."""

import io
import re
from pathlib import Path
from typing import Any

IMAGE_COLUMNS = ("images", "image")

_PLACEHOLDER = re.compile(r"<image\d*>")


def image_files(value: Any, folder: Path) -> list[bytes]:
    """The image files that a row's value holds: none, one or a list of bytes, paths (relative ones in `folder`),
    {bytes, path} as `datasets` writes them, and PIL images.

    Raises ValueError for anything else and for a path that cannot be read.
    """
    if value is None:
        return []
    return [_file(item, folder) for item in (value if isinstance(value, (list, tuple)) else [value])]


def _file(item: Any, folder: Path) -> bytes:
    if isinstance(item, dict):
        known = (item.get("bytes"), item.get("path"))
        item = next((held for held in known if held is not None), item)
    if isinstance(item, (bytes, bytearray)):
        return bytes(item)
    if isinstance(item, str):
        try:
            return (folder / item).read_bytes()
        except OSError as error:
            raise ValueError(f"names {item!r}, which cannot be read ({error.strerror}); see data.image_dir") from error
    if hasattr(item, "save") and hasattr(item, "getexif"):
        return _encoded(item)
    raise ValueError(f"must hold bytes, paths, {{bytes, path}} or PIL images, got {item!r:.60}")


def _encoded(image: Any) -> bytes:
    """A PIL image as a file; TIFF holds every mode that PNG does not."""
    buffer = io.BytesIO()
    lossless = "PNG" if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "TIFF"
    image.save(buffer, format=lossless, exif=image.getexif())
    return buffer.getvalue()


def with_placeholders(question: Any, count: int, placeholder: str) -> Any:
    """The question, a text or a list of messages, with the model's `placeholder` in place of each `<image>`; without
    any, all images go before the first message of the user.

    Raises ValueError where `count` images and the question's `<image>`s differ in number.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    found = sum(len(_PLACEHOLDER.findall(message["content"])) for message in messages)
    if found not in (0, count):
        raise ValueError(f"has {found} <image> for {count} images")
    # A replacement by function, in which backslashes mean nothing.
    texts = [_PLACEHOLDER.sub(lambda _: placeholder, message["content"]) for message in messages]
    if found < count:
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError("must hold a message of the user")
        texts[first] = placeholder * count + texts[first]
    if isinstance(question, str):
        return texts[0]
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
