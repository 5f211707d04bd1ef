"""Why a rollout is not trained on."""

UNGRADED = "ungraded"
"""No reward could be given to it, or there is no token that could be reinforced."""

SIMILAR = "similar"
"""Too close to a kept one of the same advantage (mdap)."""

LOT = "lot"
"""Drawn out (random, dppo)."""

SMALL = "small advantage"
"""Others of its group, or of the step, have larger advantages (cppo, cppo_batch)."""

ALIKE = "little variance"
"""Not in the subset whose rewards differ most (pods)."""

UNCHOSEN = "not chosen"
"""Others of its group stand for it (maxmin, dpp, match, and weights of match that are 0)."""

REJECTED = "rejected"
"""More of its outcome than are wanted (aero, balanced)."""

FILTERED = "filtered"
"""Its group's mean is outside the online filter."""

SURPLUS = "surplus"
"""Its group was sampled beyond those that the step needs."""

FREE = "zero advantage"
"""Its gradient is exactly zero: it costs no forward pass, yet counts in the loss's divisor."""

DROP_REASONS = (UNGRADED, SIMILAR, LOT, SMALL, ALIKE, UNCHOSEN, REJECTED, FILTERED, SURPLUS, FREE)
