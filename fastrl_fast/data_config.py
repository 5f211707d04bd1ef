"""Settings of the prompts, of which config.py makes the section `data`."""

from dataclasses import dataclass

from .rules import positive, require


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts to train on and how a row becomes a prompt."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a `datasets` folder or hub id, `demo:train`, `shapes:train` (drawings)
    or `reasoning_gym:TASK?key=value`."""
    split: str = "train"
    """Split to load from a hub id or a folder with several splits."""
    prompts_per_step: int = 16
    """Prompts sampled in one step, over all ranks."""
    prompt_column: str | None = None
    """Column with the question; by default the first present of prompt, problem, question."""
    answer_column: str | None = None
    """Column with the right answer; by default the first present of answer, solution, ground_truth."""
    image_column: str | None = None
    """Column with a row's image or images (bytes, paths or both as `datasets` writes them), which stand in the question
    as <image>, or before it; by default the first present of images, image, where the model reads images."""
    image_dir: str | None = None
    """Folder of images that are given by path; by default that of data.path."""
    min_pixels: int | None = None
    """Smaller images are enlarged to this area, in pixels; by default the model's own limit."""
    max_pixels: int | None = None
    """Larger images are shrunk to this area, in pixels; by default the model's own limit."""
    system_prompt: str | None = None
    """System message put before every question (needs a chat template)."""
    instruction: str = ""
    """Text put after every question, usually how to format the answer."""
    chat_template: bool = True
    """Apply the tokenizer's chat template; off: the question is the prompt, as it is."""
    max_prompt_tokens: int = 2048
    """Prompts of more tokens than this, template included, are left out and counted."""
    shuffle: bool = True
    """Visit the prompts in a new order each epoch (a function of the seed and the epoch)."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path", "the name of a file, a folder or a data set", self.path)
        positive("data", prompts_per_step=self.prompts_per_step, max_prompt_tokens=self.max_prompt_tokens)
        areas = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        positive("data", **{name: area for name, area in areas.items() if area is not None})
        if self.min_pixels is not None and self.max_pixels is not None:
            rule = f"at least data.min_pixels ({self.min_pixels})"
            require(self.max_pixels >= self.min_pixels, "data.max_pixels", rule, self.max_pixels)
