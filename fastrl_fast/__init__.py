"""Group-based reinforcement learning of language models that spends compute only where there is something to learn."""

import os
import sys

__version__ = "0.1.0"

# Idle OpenMP threads spin by default. With a second process on the same cores (another rank, a grading worker) that
# made the default run ten times slower on two cores. But an update has a thousand moments to wake one that sleeps:
# spinning for 25 us first makes it 12 to 16 % shorter on two idle cores (12 % longer where six programs share them).
# The runtime reads these when torch loads it, after these lines.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# `python -m fastrl_fast.COMMAND` is being found, whose first imports would fail with a traceback. The doctor looks
# itself.
if sys.argv[:1] == ["-m"] and "fastrl_fast.doctor" not in sys.orig_argv:
    from .missing import stop_without_libraries

    stop_without_libraries()
