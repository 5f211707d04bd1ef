"""The demo: a tiny model of our own that was shown wrong answers, and the number task on which training mends it."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""Folder of the shipped base model and tokenizer (transformers format); `demo.pretrain` made it."""

__all__ = ["MODEL_DIR"]
