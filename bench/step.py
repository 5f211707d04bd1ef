"""The training step taken apart: seconds per phase, and what sharing prompts, fused loss and pruning save of an update.

    python -m bench.step [--quick] [--json FILE] [--threads N] [--only TEXT] [--repeats N] [--models 3.4M 135M]

The update is the trainer's own (pack, score, update), on groups of planned lengths; its floor is that of bench.floor.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import timing

# isort: split
import torch

from fastrl_fast import cli, distributed, train
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import Config, DataConfig, LossConfig, ModelConfig, OptimizerConfig, UpdatesConfig
from fastrl_fast.loss import loss_terms
from fastrl_fast.memory import ModelSize
from fastrl_fast.model import build_policy
from fastrl_fast.ops import policy_loss
from fastrl_fast.optimizer import build_optimizer
from fastrl_fast.trainer import Parts, Trainer
from fastrl_fast.types import Group

from .floor import SGEMM_FLOPS, sgemm, update_flops
from .load import MODELS, load_model, make_groups, spread_lengths

CONFIG = Config(
    model=ModelConfig(path="none"),
    data=DataConfig(path="none"),
    loss=LossConfig(kind="dapo"),
    # Nothing moves and nothing is clipped: every call finds the same weights and shows its whole gradient.
    optimizer=OptimizerConfig(lr=1e-30, weight_decay=0.0, max_grad_norm=1e9),
)
"""An on-policy update: one per step, no KL term, so that nothing is scored beforehand."""


class RecomputedLoss(Trainer):
    """The trainer without its fused loss: the backward pass of the logprobs computes the logits a second time."""

    def _backward(self, update: Any, sums: dict[str, torch.Tensor]) -> None:
        limit = self.config.rollout.max_completion_tokens
        for batch in update.batches:
            logprobs, _ = self.parts.policy(batch)
            terms = loss_terms(batch, self.objective, divisor=update.divisor, max_completion_tokens=limit)
            loss, _ = policy_loss(logprobs, **terms)
            loss.backward()


VARIANTS: dict[str, tuple[bool, type[Trainer]]] = {
    "shared prompt": (True, Trainer),
    "shared prompt, loss not fused": (True, RecomputedLoss),
    "plain packed": (False, Trainer),
}
"""Whether prompts are shared, and the trainer, by name; `kept 3` before a name stands for pruned groups."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of one shape, how many of each pruning keeps, and the least ratio to plain packed that is promised."""

    name: str
    prompt: int
    completions: list[list[int]]
    wanted: float
    kept: int | None = None


def layouts(*, geometry_groups: int) -> Iterator[Layout]:
    yield Layout("8 x 512/128", 512, [[128] * 8], 2.5)
    yield Layout("16 x 1024/64", 1024, [[64] * 16], 6.0)
    yield Layout("8 x 16/512", 16, [[512] * 8], 0.97)
    # The median of the spread is its geometric mean, 306; the mean 347.
    yield Layout("geometry3k 8 x 900/350", 900, spread_lengths(geometry_groups, 8, low=120, high=780), 4.0, 3)


def update_trainer(
    policy: Any, optimizer: torch.optim.Optimizer, *, kind: type[Trainer] = Trainer, **updates: Any
) -> Trainer:
    """A trainer that can pack, score and update, without sampler, data and graders."""
    config = replace(CONFIG, updates=UpdatesConfig(**updates))
    nothing: Any = None
    parts = Parts(
        policy=policy,
        shape=policy.shape,
        reference=None,
        optimizer=optimizer,
        sampler=nothing,
        data=nothing,
        grader=nothing,
        budget=nothing,
        posterior=nothing,
        accuracy=None,
        checkpointer=nothing,
        log=None,
        device=torch.device("cpu"),
    )
    return kind(config, parts, total_steps=1)


class Updates:
    """Whole updates of given groups by one policy and one optimizer, which leave the weights alone."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.optimizer = build_optimizer(policy.parameters(), CONFIG.optimizer)
        self.optimizer.register_step_pre_hook(self._look)
        self.gradient = torch.empty(0)

    def run(self, groups: list[Group], share: bool, kind: type[Trainer]) -> timing.Run:
        """A call that returns every parameter's gradient, by its norm and its first numbers."""
        trainer = update_trainer(self.policy, self.optimizer, kind=kind, share_prompts=share)

        def update() -> torch.Tensor:
            updates = trainer.pack(groups)
            trainer.score(updates)
            trainer.update(updates)
            return self.gradient

        return update

    def _look(self, *_: Any) -> None:
        looks = [x for p in self.policy.parameters() for x in (p.grad.norm()[None], p.grad.flatten()[:64])]
        self.gradient = torch.cat(looks).clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a variant of one layout's update."""

    case: str
    variant: str
    timing: timing.Timing
    tokens: int
    """Prompt and completion tokens of the rollouts trained on, a shared prompt counted for each."""
    floor: float
    """Seconds that its multiplications alone would take at the sgemm rate of the same minutes."""

    def line(self, first: "Row") -> str:
        t = self.timing
        return (
            f"  {self.variant:30} {t.median:8.3f} s [{t.low:.3f}, {t.high:.3f}]  {self.tokens / t.median:8.0f} tokens/s"
            f"  {t.peak_mb:7.0f} MB  {self.floor / t.median:4.0%} of the floor  {t.median / first.timing.median:5.2f} x"
        )


def measure_layout(model: str, layout: Layout, *, repeats: int) -> list[Row]:
    """Check that all ways of computing the update agree, then time them in turns with the sgemm that sets the rate."""
    policy = build_policy(load_model(model), CONFIG.model, temperature=1.0)
    size, updates = ModelSize.of(policy.lm.config), Updates(policy)
    loads = {"": make_groups(layout.prompt, layout.completions)}
    if layout.kept:
        loads = {f"kept {layout.kept}, ": make_groups(layout.prompt, layout.completions, kept=layout.kept)} | loads
    runs: dict[str, timing.Run] = {}
    for prefix, groups in loads.items():
        runs |= {prefix + name: updates.run(groups, *how) for name, how in VARIANTS.items()}

    def check(gradients: dict[str, Any]) -> None:
        for prefix in loads:
            plain = gradients[f"{prefix}plain packed"]
            for name in VARIANTS:
                gap = float((gradients[prefix + name] - plain).norm() / plain.norm())
                assert gap < 1e-5, f"{layout.name}: {prefix}{name} differs by {gap:.1e} from the plain packed gradient"

    case = timing.Case(name=f"{model} {layout.name}", runs={**runs, "sgemm": sgemm}, check=check, wanted={})
    timings = timing.measure(case, device="cpu", repeats=repeats)
    rate = SGEMM_FLOPS / timings["sgemm"].median
    rows = []
    for prefix, groups in loads.items():
        tokens = sum(len(g.prompt.token_ids) + len(r.completion_ids) for g in groups for r in g.rollouts if r.kept)
        for name, (share, _) in VARIANTS.items():
            floor = update_flops(size, groups, shared=share) / rate
            row = Row(case=case.name, variant=prefix + name, timing=timings[prefix + name], tokens=tokens, floor=floor)
            rows.append(row)
    print(f"{case.name}  (sgemm {rate / 1e9:.0f} GFLOP/s, load {os.getloadavg()[0]:.1f})")
    for row in rows:
        print(row.line(rows[0]), flush=True)
    return rows


PHASE_RUNS = {
    "fastrl": ["--config=demo"],
    "no pruning": ["--config=demo", "--prune.method=none"],
}


def measure_phases(*, steps: int) -> dict[str, dict[str, float]]:
    """Median seconds per phase of whole steps on the demo's task, the runs taking turns step by step."""
    config, _ = cli.parse(PHASE_RUNS["fastrl"], prog="bench.step")
    found: dict[str, dict[str, float]] = {}
    with build_grader(config.reward) as grader:
        trainers = {name: _demo_trainer(arguments, grader) for name, arguments in PHASE_RUNS.items()}
        peaks = {name: timing.peak_megabytes(trainer.step) for name, trainer in trainers.items()}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for _ in range(steps):
            for name, trainer in trainers.items():
                trainer.clock.take()
                metrics = trainer.step()
                seconds = {phase: s for phase, s in trainer.clock.take().items()} | {"step": metrics["seconds/step"]}
                taken[name].append(seconds | {"tokens/s": metrics["tokens/generated"] / seconds["step"]})
    for name, records in taken.items():
        found[name] = {key: statistics.median(record[key] for record in records) for key in records[0]}
        found[name]["peak MB"] = peaks[name]
        print(f"step of the demo, {name}: " + "  ".join(f"{key} {value:.3g}" for key, value in found[name].items()))
    return found


def _demo_trainer(arguments: list[str], grader: Any) -> Trainer:
    config, _ = cli.parse(arguments, prog="bench.step")
    inputs = train.load_inputs(config, grader)
    parts = train.build_parts(config, inputs, grader, torch.device("cpu"), folder=Path("none"), log=None)
    return Trainer(config, parts, total_steps=1000)


def ratios(rows: list[Row], wanted: dict[str, float]) -> list[str]:
    """Plain packed training against the first variant of each case, and the least share of the floor."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        plain = next(row for row in mine if row.variant == "plain packed")
        ratio = plain.timing.median / mine[0].timing.median
        share = mine[0].floor / mine[0].timing.median
        lines.append(
            f"{case}: plain packed / {mine[0].variant} {ratio:.2f} (wanted {wanted[case]:g}, in multiplications "
            f"{plain.floor / mine[0].floor:.2f}), "
            f"peak memory {plain.timing.peak_mb / mine[0].timing.peak_mb:.2f}; "
            f"of the floor {share:.0%}, plain packed {plain.floor / plain.timing.median:.0%} (wanted 70%)"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest model, two turns: within a minute")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="only layouts whose name holds this text")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["3.4M"], help="models of the updates")
    options = parser.parse_args()
    if options.quick:
        options.models, options.repeats = ["0.6M"], 2
    torch.set_num_threads(options.threads)
    device = distributed.start()
    assert device.type == "cpu", "the bench counts the memory and the sgemm of a CPU"
    phases = measure_phases(steps=3 if options.quick else 10) if options.only in "phases" else {}
    rows: list[Row] = []
    wanted: dict[str, float] = {}
    for model in options.models:
        for layout in layouts(geometry_groups=1 if options.quick or model == "135M" else 4):
            if options.only in layout.name:
                rows += measure_layout(model, layout, repeats=options.repeats)
                wanted[rows[-1].case] = layout.wanted
    distributed.stop()
    lines = ratios(rows, wanted)
    print("\n".join(lines))
    if options.json:
        record = {
            "machine": timing.machine("cpu", options.threads),
            "phases": phases,
            "rows": [asdict(row) for row in rows],
            "ratios": lines,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
