"""`python -m fastrl_fast.export RUN_DIR OUT_DIR [--best]`: a run's newest, or best, checkpoint as a Hugging Face
folder."""

import argparse
import shlex
from pathlib import Path

from . import cli, run_folder
from .builtin import resolve_model
from .checkpoint import choose, load_weights
from .file_modes import open_weights
from .model import save_pretrained


def main() -> int:
    parser = argparse.ArgumentParser(prog="fastrl_fast.export", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("out_dir", type=Path, help="folder to write, which must not exist or be empty")
    parser.add_argument("--best", action="store_true", help="the checkpoint that was best on held-out prompts")
    args = parser.parse_args()
    checkpoint = export(args.run_dir, args.out_dir, best=args.best)
    out, size = str(args.out_dir), sum(file.stat().st_size for file in args.out_dir.iterdir())
    print(f"wrote {shlex.quote(out)}: the weights of {checkpoint} in float32 and the tokenizer, {size / 1e9:.3g} GB")
    print(f"next: from_pretrained({out!r}) of transformers, or vllm serve {shlex.quote(out)}")
    return 0


def export(run: Path, out: Path, *, best: bool = False) -> Path:
    """Write weights, configuration and tokenizer, and return the checkpoint that they are of.

    Raises ValueError where `out` holds files, or `run` is no run or has no checkpoint.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out_dir: {out} exists and is not an empty folder")
    run_folder.load_settings(run)
    config, _ = cli.parse(["--config", str(run / run_folder.CONFIG_FILE)], prog="fastrl_fast.export")
    checkpoint = choose(run / "checkpoints", best=best)
    save_pretrained(resolve_model(config.model.path), load_weights(checkpoint), out, config.model)
    open_weights(out)
    return checkpoint


if __name__ == "__main__":
    cli.run(main)
