"""The demos: tiny models of our own that were shown wrong answers, and the tasks on which training mends them."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""Folder of the shipped base model and tokenizer (transformers format); `demo.pretrain` made it."""

SHAPES_MODEL_DIR = Path(__file__).resolve().parent / "shapes_model"
"""Folder of the shipped model that reads images; `demo.pretrain_shapes` made it."""

__all__ = ["MODEL_DIR", "SHAPES_MODEL_DIR"]
