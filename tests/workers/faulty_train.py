"""The training command with faults on one rank: `faulty_train.py RANK FAULTS [arguments of train]`.

FAULTS is comma-separated STEP:KIND, in the update of that step (from 1): nan makes one gradient of the rank's own part
NaN, raise is an exception of the code, kill ends the process as kill -9 does.
"""

import math
import os
import signal
import sys
from collections.abc import Iterable

import torch

from fastrl_fast import cli, distributed, train
from fastrl_fast.trainer import Trainer


def main() -> int:
    rank, faults = int(sys.argv[1]), dict(fault.split(":") for fault in sys.argv[2].split(","))
    sys.argv[1:] = sys.argv[3:]
    update, clip = Trainer.update, torch.nn.utils.clip_grad_norm_
    now: list[str | None] = [None]

    def faulty_update(trainer: Trainer, updates: list) -> object:
        now[0] = faults.get(str(trainer.steps_done + 1)) if distributed.rank() == rank else None
        if now[0] == "raise":
            raise RuntimeError("broken on purpose")
        if now[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        result = update(trainer, updates)
        assert all(bool(p.detach().to_local().isfinite().all()) for p in trainer.parts.policy.parameters())
        return result

    def faulty_clip(parameters: Iterable, *arguments: object) -> object:
        parameters = list(parameters)
        if now[0] == "nan":
            next(p for p in parameters if p.grad.to_local().numel()).grad.to_local().fill_(math.nan)
        return clip(parameters, *arguments)

    torch.nn.utils.clip_grad_norm_ = faulty_clip
    Trainer.update = faulty_update  # type: ignore[method-assign]
    return train.main()


if __name__ == "__main__":
    cli.run(main)
