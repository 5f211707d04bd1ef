"""Run the kernel of faults.cu with one planted fault: `python faults.py LIBRARY FAULT SEED`; exit status 1 if wrong."""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "faults.cu"
FAULTS = re.findall(r"^  (k\w+),", SOURCE.read_text().split("enum Fault")[1], re.MULTILINE)
BLOCKS = 6


def sums_are_right(library: Path, fault: str, seed: int) -> bool:
    emulated = ctypes.CDLL(str(library))
    emulated.emulator_configure(ctypes.c_uint64(seed), 1 + seed % 3)
    numbers = np.arange(BLOCKS * 64, dtype=np.float32) % 7 + 1
    sums = np.full(BLOCKS, np.nan, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (numbers, sums)]
    error = emulated.sum_of_blocks(FAULTS.index(fault), *pointers, BLOCKS)
    return error == 0 and bool((sums == numbers.reshape(BLOCKS, 64).sum(1)).all())


if __name__ == "__main__":
    sys.exit(not sums_are_right(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
