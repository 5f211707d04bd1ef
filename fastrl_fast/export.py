"""`python -m fastrl_fast.export RUN_DIR OUT_DIR [--best]`: a run's newest, or best, checkpoint as a Hugging Face
folder."""

import argparse
from pathlib import Path

from . import cli, run_folder
from .builtin import resolve_model
from .checkpoint import load_weights
from .file_modes import open_weights
from .model import save_pretrained


def main() -> int:
    parser = argparse.ArgumentParser(prog="fastrl_fast.export", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("out_dir", type=Path, help="folder to write, which must not exist or be empty")
    parser.add_argument("--best", action="store_true", help="the checkpoint that was best on held-out prompts")
    args = parser.parse_args()
    export(args.run_dir, args.out_dir, best=args.best)
    print(f"wrote {args.out_dir}")
    return 0


def export(run: Path, out: Path, *, best: bool = False) -> None:
    """Write weights, configuration and tokenizer.

    Raises ValueError where `out` holds files, or `run` is no run or has no checkpoint.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out_dir: {out} exists and is not an empty folder")
    run_folder.load_settings(run)
    config, _ = cli.parse(["--config", str(run / run_folder.CONFIG_FILE)], prog="fastrl_fast.export")
    weights = load_weights(run / "checkpoints", best=best)
    save_pretrained(resolve_model(config.model.path), weights, out, config.model)
    open_weights(out)


if __name__ == "__main__":
    cli.run(main)
