"""Training and held-out prompts: `load_rows` reads any source, `PromptData` makes prompts and hands them out."""

from .prompt_data import PromptData
from .sources import load_rows

__all__ = ["PromptData", "load_rows"]
