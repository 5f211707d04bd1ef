"""Group-based reinforcement learning of language models that spends compute only where there is something to learn."""

import os
import sys

__version__ = "0.1.0"

# Idle OpenMP threads spin by default. With a second process on the same cores (another rank, a grading worker) that
# made the default run ten times slower on two cores. The runtime reads this when torch loads it, after this line.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `python -m fastrl_fast.COMMAND` is being found, whose first imports would fail with a traceback. The doctor looks
# itself.
if sys.argv[:1] == ["-m"] and "fastrl_fast.doctor" not in sys.orig_argv:
    from .missing import stop_without_libraries

    stop_without_libraries()
