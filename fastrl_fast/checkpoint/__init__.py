"""Checkpoints that are either complete or not there, written while training goes on, and the way back."""

from .checkpointer import Checkpointer, complete, load_weights

__all__ = ["Checkpointer", "complete", "load_weights"]
