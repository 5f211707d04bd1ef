"""Group-based reinforcement learning of language models that spends compute only where there is something to learn."""

__version__ = "0.1.0"
