"""What this machine can do at best, measured: its GEMM at the head's sizes, its memory, its shortest launch.

python bench/limits.py [--json FILE] [--device cuda] [--quick]
"""

from collections.abc import Iterable

import timing
import torch


def gemm(setting: timing.Setting, t: int, h: int, v: int) -> timing.Case:
    """[t, h] x [h, v] in bfloat16 on a GPU, float32 on a CPU; 2 t h v operations."""
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    a, b = (torch.randn(n, h, device=setting.device).to(dtype) for n in (t, v))
    out = torch.empty(t, v, device=setting.device, dtype=dtype)
    return timing.Case(
        name=f"gemm {t} {h} {v}", runs={"torch.mm": lambda: torch.mm(a, b.t(), out=out)}, check=_nothing, wanted={}
    )


def copy(setting: timing.Setting, megabytes: int) -> timing.Case:
    source = torch.zeros(megabytes << 18, device=setting.device)
    target = torch.empty_like(source)
    return timing.Case(
        name="copy", runs={"copy_": lambda: target.copy_(source)}, check=_nothing, wanted={}, bytes=2 * source.nbytes
    )


def launch(setting: timing.Setting) -> timing.Case:
    one = torch.zeros(1, device=setting.device)
    return timing.Case(name="launch", runs={"zero_": one.zero_}, check=_nothing, wanted={})


def _nothing(_: object) -> None: ...


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    if setting.on_gpu:
        yield gemm(setting, 16384, 3584, 152064)
        yield gemm(setting, 16384, 1536, 151936)
        yield copy(setting, 2048)
    else:
        yield gemm(setting, 64, 64, 512)
        yield copy(setting, 1 if setting.quick else 256)
    yield launch(setting)


if __name__ == "__main__":
    timing.main(__doc__, cases)
