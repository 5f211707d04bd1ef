"""Random decisions that are a function of what they decide: no state, no order, no number of ranks changes one."""

import hashlib


def draw(*what: object) -> float:
    """A number in [0, 1), uniform over different `what`, the same in every process."""
    key = "\0".join(map(str, what)).encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53
