"""Every method against plain training, over seeds: tables and a plot.

    python -m bench.methods [--seeds 5] [--steps 100] [--out runs/methods] [--only grpo-aero grpo-plain] [--quick]
    python -m bench.methods --setting smollm2           # a real model on sums, as small as two cores allow
    python -m bench.methods --document docs/methods.md  # the document, from the finished runs of both settings

One process per run. Call it again after a stop: finished runs are read, an unfinished one goes on at its checkpoint.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .methods_document import write_document
from .methods_report import write_report
from .methods_runs import Run, find

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
WEIGHTED = "--prune.weighting=multiplicity"
SMALL = "--updates.rollouts_per_update=32"
MORE_PROMPTS = ["--data.prompts_per_step=24"]
VARIANTS = {
    # What plain training costs where nobody looks at the advantages before the update.
    "every_rollout": ["--config=grpo_every_rollout"],
    # Updates as small as fastrl_code's, which learns more per step: by pruning or by their number?
    "plain_small": [*PLAIN, SMALL],
    "fastrl_small": ["--config=fastrl", WEIGHTED, SMALL],
    # Classes keep their weight: 7 right and 1 wrong no longer sum to -2.12.
    "fastrl_weighted": ["--config=fastrl", WEIGHTED],
    # Half as many prompts more, out of what pruning saves.
    "fastrl_p24": ["--config=fastrl", *MORE_PROMPTS],
    "fastrl_p24_weighted": ["--config=fastrl", *MORE_PROMPTS, WEIGHTED],
    # About as many rollouts as plain training: AERO leaves a third of them unused where most prompts need no rescue.
    "aero_p24": ["--config=aero", *AERO, *MORE_PROMPTS],
    "fastrl_aero_p24": ["--config=fastrl_aero", *AERO, *MORE_PROMPTS],
    "fastrl_aero_p24_weighted": ["--config=fastrl_aero", *AERO, *MORE_PROMPTS, WEIGHTED],
}
"""Levers, run where --only names them."""
FIRST = ("fastrl", "fastrl_code", *(name for name in VARIANTS if name.startswith("fastrl") and "aero" not in name))
"""Recipes that carry an objective of their own: the run's objective is put behind them."""

# The loss of plain GRPO, so that fastrl and plain differ by pruning and budget alone.
GRPO_LOSS = ["--loss.kind=grpo", "--loss.kl_coef=0", "--loss.dual_clip=null", "--loss.aggregation=null"]
GRPO_LOSS += ["--loss.clip_low=null", "--loss.clip_high=null"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and data to compare on, and what a run of it takes where nothing else is said."""

    arguments: tuple[str, ...]
    runs: tuple[str, ...]
    seeds: int
    steps: int
    eval_prompts: int
    evaluations: int


SETTINGS = {
    "demo": Setting(
        ("--config=demo",),
        tuple(f"{objective}-{method}" for objective in OBJECTIVES for method in METHODS),
        seeds=5,
        steps=100,
        eval_prompts=128,
        evaluations=5,
    ),
    "smollm2": Setting(
        (
            "--config=gsm8k_smollm2",
            "--data.path={folder}/train.jsonl",
            "--eval.path={folder}/heldout.jsonl",
            "--data.chat_template=false",
            # An answer is one line of a few tokens, ended by a newline.
            "--rollout.max_completion_tokens=6",
            "--rollout.stop_token_ids=[198]",
            "--rollout.temperature=1.0",
            "--optimizer.lr=3e-5",
        ),
        ("grpo-plain", "grpo-fastrl", "grpo-aero", "grpo-fastrl_aero"),
        seeds=3,
        steps=10,
        eval_prompts=64,
        evaluations=1,
    ),
}


SHOTS = "12 + 31 = 43\n58 + 7 = 65\n"


def write_sums(folder: Path) -> None:
    """Write the data of the setting smollm2: two-digit plus one-digit numbers behind two examples, of which the model
    gets about a fifth right, and most groups of eight some. A quarter of the sums is held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for name, part in (("train", pairs[: len(pairs) * 3 // 4]), ("heldout", pairs[len(pairs) * 3 // 4 :])):
        rows = [{"question": f"{SHOTS}{a} + {b} =", "answer": str(a + b)} for a, b in part]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def arguments(objective: str, method: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Command-line settings of one run; recipes first, later ones win."""
    ours, theirs = {**METHODS, **VARIANTS}[method], OBJECTIVES[objective]
    if method in FIRST:
        # The recipe, then the objective, then the method's own settings.
        recipes = [argument for argument in ours if argument.startswith("--config")]
        both = [*recipes, *theirs, *(GRPO_LOSS if objective == "grpo" else [])]
        both += [argument for argument in ours if argument not in recipes]
        if method == "fastrl_code" and objective == "gspo":
            # A quarter of a plain update, as elsewhere: gspo's are four a step.
            both += ["--updates.minibatches=1", "--updates.rollouts_per_update=8", "--prune.align=8"]
    else:
        both = [*theirs, *ours]
    setting = SETTINGS[options.setting]
    every = max(1, options.steps // setting.evaluations)
    return [
        *(argument.format(folder=options.out) for argument in setting.arguments),
        *both,
        f"--max_steps={options.steps}",
        f"--seed={seed}",
        f"--eval.every={every}",
        f"--eval.prompts={options.eval_prompts}",
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
    command = [sys.executable, "-m", "fastrl_fast.train", *arguments(objective, method, seed, options)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, f"--run_dir={folder}"], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{objective}-{method}-{seed} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return folder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.methods", description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="demo")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--eval-prompts", type=int)
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/methods, runs/methods_smollm2")
    parser.add_argument("--only", nargs="*", help=f"pairs such as grpo-plain; also {', '.join(VARIANTS)}")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, grpo only: does it run at all")
    parser.add_argument("--document", type=Path, help="write this document from finished runs; train nothing")
    parser.add_argument("--commit", help="what the document says was measured; by default git's HEAD")
    options = parser.parse_args()
    setting = SETTINGS[options.setting]
    options.seeds = options.seeds or setting.seeds
    options.steps = options.steps or setting.steps
    options.eval_prompts = options.eval_prompts or setting.eval_prompts
    options.out = options.out or Path(
        "runs/methods" if options.setting == "demo" else f"runs/methods_{options.setting}"
    )
    options.only = options.only or list(setting.runs)
    if options.quick:
        options.seeds, options.steps, options.eval_prompts = 1, 4, 16
        options.out = options.out / "quick"
        options.only = [pair for pair in options.only if pair.startswith("grpo-")]
    for pair in options.only:
        objective, _, method = pair.partition("-")
        if objective not in OBJECTIVES or method not in {**METHODS, **VARIANTS}:
            names = f"{list(OBJECTIVES)}, {[*METHODS, *VARIANTS]}"
            parser.error(f"--only: {pair} is not one of OBJECTIVE-METHOD with {names}")
    return options


def main() -> int:
    options = parse()
    if options.document:
        folders = {name: Path("runs/methods" if name == "demo" else f"runs/methods_{name}") for name in SETTINGS}
        folders[options.setting] = options.out
        print(
            write_document({name: find(folder) for name, folder in folders.items()}, options.document, options.commit)
        )
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.setting == "smollm2":
        write_sums(options.out)
    runs = []
    # Seed by seed, so that a stop leaves whole comparisons.
    for seed in range(options.seeds):
        for pair in options.only:
            objective, _, method = pair.partition("-")
            runs.append(Run.read(run(objective, method, seed, options)))
            print(f"{pair} seed {seed}: {runs[-1].line()}", flush=True)
    print(write_report(runs, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
