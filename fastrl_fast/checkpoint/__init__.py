"""Checkpoints that are either complete or not there, written while training goes on, and the way back."""

from .checkpointer import Checkpointer
from .on_disk import choose, complete, load_weights

__all__ = ["Checkpointer", "choose", "complete", "load_weights"]
