"""What goes wrong in silence, said aloud: each alarm once on the console, and in the metrics of every step it holds
in."""

from collections.abc import Callable
from dataclasses import dataclass

from .config import Config
from .loss import ABOVE_ZERO
from .method_config import STAGED

Metrics = dict[str, float]

TRUNCATED_SHARE = 0.25
"""A cut completion is wrong whatever it was about to say: from a quarter on, length decides the reward more than the
answer does."""
DEAD_SHARE = 0.8
"""Above it fewer than one group in five teaches anything: the step pays five times for its gradient."""
DEAD_STEPS = 5
"""One hard batch is chance; five in a row are the data."""
SAME_REWARD = 1e-6
"""Rewards that deviate by less are equal: the deviation is the root of a difference of float64 sums."""
SAME_REWARD_STEPS = 3
"""A short batch of an easy or hard task may well agree once; a reward that is broken agrees always."""
SAMPLER_GAP = {"float32": 1e-3, "bfloat16": 0.03}
"""By model.dtype, mean |logprob - rollout_logprob| in nats before any update moved the policy. Measured on the demo's
model: 2e-7 and 0.003 where all is well; in float32 0.05 with a temperature of 0.7 on one side, 0.004 with top_k 20."""
CEILING_SHARE = 0.9
"""Mean group size, as a share of the largest one allowed, at which the ceiling and not the rule sets the sizes."""
CEILING_STEPS = 3
"""The first prompts of a run may all be hard."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A condition on a step's metrics, said once it has held for `steps` steps in a row."""

    name: str
    holds: Callable[[Metrics, Config], bool]
    text: Callable[[Metrics, Config], str]
    steps: int = 1


class Alarms:
    """Remembers for how long each alarm has held and which were said; a resumed run says them again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.held = dict.fromkeys((alarm.name for alarm in ALARMS), 0)
        self.said: set[str] = set()

    def check(self, metrics: Metrics, say: Callable[[str], None]) -> Metrics:
        """Return {"alarm/NAME": 1 where it holds, else 0} for a step's metrics; tell `say` what holds for the first
        time."""
        flags = {}
        for alarm in ALARMS:
            self.held[alarm.name] = self.held[alarm.name] + 1 if alarm.holds(metrics, self.config) else 0
            holds = self.held[alarm.name] >= alarm.steps
            flags[f"alarm/{alarm.name}"] = float(holds)
            if holds and alarm.name not in self.said:
                self.said.add(alarm.name)
                say(alarm.text(metrics, self.config))
        return flags


def _dead_share(metrics: Metrics) -> float:
    return metrics["groups/dead"] / max(metrics["groups/count"], 1.0)


def _group_size(metrics: Metrics) -> float:
    return metrics["rollouts/generated"] / max(metrics["groups/count"], 1.0)


def _gap(metrics: Metrics, config: Config) -> bool:
    """Only where the step took one update, of rollouts of the policy itself: once it has moved a gap is no sign of
    anything."""
    itself = metrics["optimizer/updates"] <= 1 and metrics.get("rollout/staleness", 0.0) == 0
    return itself and metrics.get("policy/sampler_gap", 0.0) > SAMPLER_GAP[config.model.dtype]


def _at_ceiling(metrics: Metrics, config: Config) -> bool:
    budget = config.budget
    stages = budget.kind in STAGED and budget.max_group_size > budget.group_size
    return stages and _group_size(metrics) >= CEILING_SHARE * budget.max_group_size


def _out_of_tries(metrics: Metrics, config: Config) -> bool:
    replaces = config.budget.filter or config.budget.kind == "greso"
    return replaces and config.budget.tries > 1 and metrics["collect/tries"] >= config.budget.tries


ALARMS = (
    Alarm(
        "truncation",
        lambda m, c: m["completion/truncated_fraction"] > TRUNCATED_SHARE,
        lambda m, c: (
            f"{m['completion/truncated_fraction']:.0%} of the completions were cut at "
            f"rollout.max_completion_tokens ({c.rollout.max_completion_tokens}) before their answer; raise it"
        ),
    ),
    Alarm(
        "same_reward",
        lambda m, c: m["rollouts/graded"] > 1 and m["reward/std"] < SAME_REWARD,
        lambda m, c: (
            f"every rollout got the reward {m['reward/mean']:g} in {SAME_REWARD_STEPS} steps running, so nothing is "
            "learnt; look at rollouts.jsonl: do the rewards find the answer where the prompt asks for it?"
        ),
        steps=SAME_REWARD_STEPS,
    ),
    Alarm(
        "nothing_graded",
        lambda m, c: m["rollouts/graded"] == 0 < m["rollouts/generated"],
        lambda m, c: (
            f"no rollout could be graded in {SAME_REWARD_STEPS} steps running, so nothing is learnt; look at "
            "rollouts.jsonl: can the rewards read the data's answers, and does the model say anything?"
        ),
        steps=SAME_REWARD_STEPS,
    ),
    Alarm(
        "dead_groups",
        lambda m, c: m["rollouts/graded"] > 0 and _dead_share(m) > DEAD_SHARE,
        lambda m, c: (
            f"{_dead_share(m):.0%} of the groups have equal rewards, {DEAD_STEPS} steps running; the data is too easy "
            "or too hard: larger groups, other data, or budget.kind greso"
        ),
        steps=DEAD_STEPS,
    ),
    Alarm(
        "sampler_gap",
        _gap,
        lambda m, c: (
            f"sampler and trainer differ by {m['policy/sampler_gap']:.4f} in the logprob of a token before any update; "
            "the rollouts are of another policy than the one trained (top_p, top_k and min_p below their defaults do "
            "that too)"
        ),
    ),
    Alarm(
        "grader_timeouts",
        lambda m, c: m["grader/timeouts"] + m["grader/worker_deaths"] > 0,
        lambda m, c: (
            f"{m['grader/timeouts']:.0f} answers took longer than reward.timeout ({c.reward.timeout:g} s) and "
            f"{m['grader/worker_deaths']:.0f} ended their worker; these get 0 whatever they say"
        ),
    ),
    Alarm(
        "logprob_above_zero",
        lambda m, c: m.get("policy/logprobs_above_zero", 0.0) > 0,
        lambda m, c: (
            f"{m['policy/logprobs_above_zero']:.1e} of the trained tokens have a logprob above {ABOVE_ZERO:g}, which "
            "no probability has; the model's head or a kernel is wrong"
        ),
    ),
    Alarm(
        "gradient_not_finite",
        lambda m, c: m["optimizer/not_finite"] > 0,
        lambda m, c: (
            f"{m['optimizer/not_finite']:.0f} updates of this step had a gradient that is not finite and were skipped; "
            "a lower optimizer.lr, or model.dtype float32 to find the cause"
        ),
    ),
    Alarm(
        "learning_rate_zero",
        lambda m, c: m["optimizer/lr"] == 0,
        lambda m, c: f"the learning rate is 0 (optimizer.schedule {c.optimizer.schedule}): this step changes nothing",
    ),
    Alarm(
        "budget_at_ceiling",
        _at_ceiling,
        lambda m, c: (
            f"groups have {_group_size(m):.1f} rollouts of budget.max_group_size {c.budget.max_group_size} on average, "
            f"{CEILING_STEPS} steps running; the budget's rule no longer decides"
        ),
        steps=CEILING_STEPS,
    ),
    Alarm(
        "budget_out_of_tries",
        _out_of_tries,
        lambda m, c: (
            f"budget.tries ({c.budget.tries}) ran out: {m['groups/count']:.0f} groups were sampled and "
            f"{m['prompts/skipped']:.0f} prompts skipped for a step of {c.data.prompts_per_step}"
        ),
    ),
)
