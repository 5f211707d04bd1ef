"""`python -m fastrl_fast.evaluate [RUN_DIR] [--config ...] [--eval.path ...]`: avg@k and pass@k on held-out prompts.

With a run folder its settings are the starting point and the newest checkpoint's weights are measured; without one, the
model of the config as it is.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from . import cli, distributed, run_folder
from .accuracy import build_accuracy, build_grader
from .builtin import resolve_model
from .checkpoint import choose, load_weights
from .config import Config
from .interrupt import ENGINE_LOST_CODE
from .model import load_causal_lm, load_tokenizer, sampler_copy
from .rollout import EngineLost, EngineSampler, Sampler, build_engine, build_sampler
from .vision import barred_tokens, load_images


def main() -> int:
    argv = sys.argv[1:]
    run = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    if run is not None:
        run_folder.load_settings(run)
        argv = ["--config", str(run / run_folder.CONFIG_FILE), *argv]
    about = "With RUN_DIR its settings, and the weights of its newest checkpoint; the held-out data is eval.path. "
    config, _ = cli.parse(argv, prog="fastrl_fast.evaluate [RUN_DIR]", about=about)
    device = distributed.start()
    try:
        result = evaluate(config, run, device)
        if distributed.rank() == 0:
            print(json.dumps(result))
    except EngineLost as lost:
        print(f"error: {lost}", file=sys.stderr, flush=True)
        return ENGINE_LOST_CODE
    finally:
        distributed.stop()
    return 0


def evaluate(config: Config, run: Path | None, device: torch.device) -> dict[str, float]:
    """Measure the run's newest weights, or the config's model. Raises ValueError where no held-out data is
    configured."""
    if config.eval.path is None:
        raise ValueError("eval.path must name held-out data, got None: give --eval.path FILE")
    path = resolve_model(config.model.path)
    tokenizer = load_tokenizer(path, config.model)
    images = load_images(path, tokenizer, config.model, config.data)
    with build_grader(config.reward) as grader:
        accuracy = build_accuracy(config, tokenizer, grader, images)
        assert accuracy is not None, "eval.path was checked"
        lm = load_causal_lm(path, config.model)
        sampler: Sampler
        if config.rollout.engine == "local":
            lm = sampler_copy(lm, dtype=getattr(torch, config.model.dtype), device=device)
            sampler = build_sampler(config.rollout, lm, tokenizer, images=images, barred=barred_tokens(lm.config))
        else:
            sampler = build_engine(config, path, lm, tokenizer)
        weights: Mapping[str, Tensor] = dict(lm.named_parameters())
        names = list(weights)  # in the order that servers are told of
        if run is not None:
            weights = load_weights(choose(run / "checkpoints"))
        if run is not None or config.rollout.engine == "vllm_server":  # it may have those of a run
            sampler.load_weights((name, weights[name].detach()) for name in names)
        result = accuracy.measure(sampler)
        if isinstance(sampler, EngineSampler):
            sampler.close()
        return result


if __name__ == "__main__":
    cli.run(main)
