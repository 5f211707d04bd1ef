"""Counter-based random numbers: a draw is a hash of what it is for; no state, batch, rank or resume changes it."""

import hashlib

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's int64 shift carries the sign bit along, which is masked off here."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of the 64-bit words (Steele, Lea and Flood 2014); wraps in int64."""
    for bits, factor in _MIX:
        x = (x ^ _shift_right(x, bits)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def text_key(text: str) -> int:
    """A 64-bit key of `text` as an int64 value, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(prompt_keys: Tensor, indices: Tensor, *, seed: int, step: int, count: int) -> Tensor:
    """Draws in [0, 1), float64 [N, count], one for each rollout and token position.

    prompt_keys, indices [N] int64 name the rollouts. Row n is the SplitMix64 stream that starts at the hash of (seed,
    step, prompt_keys[n], indices[n]); a draw keeps the upper 52 bits, so it is at most 1 - 2^-52.
    """
    state = torch.full_like(prompt_keys, _signed(seed))
    for word in (torch.full_like(prompt_keys, _signed(step)), prompt_keys, indices):
        state = _mix(state + _signed(_GAMMA)) ^ word
    state = _mix(state + _signed(_GAMMA))
    counter = torch.arange(1, count + 1, device=prompt_keys.device) * _signed(_GAMMA)
    bits = _shift_right(_mix(state.unsqueeze(1) + counter), 12)
    return bits.to(torch.float64) * 2.0**-52
