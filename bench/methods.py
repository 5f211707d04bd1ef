"""Every method against plain training, over seeds, on the default CPU task: one table and one plot.

    python -m bench.methods [--seeds 5] [--steps 100] [--out runs/methods] [--only grpo-aero grpo-plain] [--quick]

One process per run. Call it again after a stop: finished runs are read, an unfinished one goes on at its checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from .methods_report import Run, write_report

OBJECTIVES = {
    "grpo": [],
    "dapo": ["--config=dapo"],
    "gspo": ["--config=gspo", "--updates.minibatches=4"],
}
PLAIN = ["--prune.method=none"]
# AERO's budget of rollouts is plain training's: 8 at most, half of them to explore.
AERO = ["--budget.group_size=4", "--budget.max_group_size=8", "--prune.keep=2", "--budget.filter=false"]
METHODS = {
    "plain": PLAIN,
    "cppo": ["--config=cppo"],
    "greso": ["--config=greso"],
    "pods": ["--config=pods"],
    "random": ["--config=random"],
    "fastrl": ["--config=fastrl"],
    "fastrl_code": ["--config=fastrl_code"],
    "aero": ["--config=aero", *AERO],
    "fastrl_aero": ["--config=fastrl_aero", *AERO],
}
FIRST = ("fastrl", "fastrl_code")
"""Recipes that carry an objective of their own: the run's objective is put behind them."""

# The loss of plain GRPO, so that fastrl and plain differ by pruning and budget alone.
GRPO_LOSS = ["--loss.kind=grpo", "--loss.kl_coef=0", "--loss.dual_clip=null", "--loss.aggregation=null"]
GRPO_LOSS += ["--loss.clip_low=null", "--loss.clip_high=null"]


def arguments(objective: str, method: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Command-line settings of one run; recipes first, later ones win."""
    ours, theirs = METHODS[method], OBJECTIVES[objective]
    if method in FIRST:
        both = [*ours, *theirs, *(GRPO_LOSS if objective == "grpo" else [])]
        if method == "fastrl_code" and objective == "gspo":
            # A quarter of a plain update, as elsewhere: gspo's are four a step.
            both += ["--updates.minibatches=1", "--updates.rollouts_per_update=8", "--prune.align=8"]
    else:
        both = [*theirs, *ours]
    evaluation = [f"--eval.every={max(1, options.steps // 5)}", f"--eval.prompts={options.eval_prompts}"]
    return [
        "--config=demo",
        *both,
        f"--max_steps={options.steps}",
        f"--seed={seed}",
        *evaluation,
        "--eval.samples=8",
        "--checkpoint.every=20",
        "--log.rollouts=false",
        "--reward.workers=1",
    ]


def run(objective: str, method: str, seed: int, options: argparse.Namespace) -> Path:
    """Train in a process of its own, unless the folder holds a finished run; return the folder."""
    folder = options.out / f"{objective}-{method}-{seed}"
    if (folder / "summary.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fastrl_fast.train", *arguments(objective, method, seed, options)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, f"--run_dir={folder}"], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{objective}-{method}-{seed} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.methods", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval-prompts", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--only", nargs="*", help="pairs such as grpo-aero; plain is needed to compare with")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, grpo only: does it run at all")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.eval_prompts = 1, 4, 16
        options.out = options.out / "quick"
    objectives = ["grpo"] if options.quick else list(OBJECTIVES)
    pairs = options.only or [f"{objective}-{method}" for objective in objectives for method in METHODS]
    runs = []
    # Seed by seed, so that a stop leaves whole comparisons.
    for seed in range(options.seeds):
        for pair in pairs:
            objective, _, method = pair.partition("-")
            if objective not in OBJECTIVES or method not in METHODS:
                parser.error(f"--only: {pair} is not one of OBJECTIVE-METHOD with {list(OBJECTIVES)}, {list(METHODS)}")
            runs.append(Run.read(run(objective, method, seed, options), objective, method, seed))
            print(f"{pair} seed {seed}: {runs[-1].line()}", flush=True)
    settings = json.dumps({"steps": options.steps, "seeds": options.seeds, "eval prompts": options.eval_prompts})
    print(write_report(runs, options.out, command="python -m bench.methods", settings=settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
