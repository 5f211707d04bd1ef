"""One update's forward and backward passes with shared prompts computed once, against a prompt for every completion.

python bench/shared_prompt.py [--json FILE] [--threads N] [--only TEXT] [--repeats N]

The model is a Qwen2 of 3M parameters; rows are packed and planned by the trainer's own functions, in micro-batches of
16384 tokens. The step that shares nothing is the trainer's with updates.share_prompts=false.
"""

from collections.abc import Iterable
from typing import Any

import timing
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fastrl_fast.microbatches import plan_microbatches
from fastrl_fast.model import Policy
from fastrl_fast.packing import PixelReader, Sequence, pack

TOKENS_PER_MICROBATCH = 16384


def make_policy() -> Policy:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return Policy(Qwen2ForCausalLM(config), temperature=1.0)


def sequences(prompt: int, completion: int, count: int, *, share: bool) -> list[Sequence]:
    make = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(4096, (length,), generator=make).tolist()

    asked = ids(prompt)
    group = 0 if share else None
    answers = [ids(completion) for _ in range(count)]
    return [Sequence(asked, answer, [0.0] * completion, 1.0, 1.0, group) for answer in answers]


def update(policy: Policy, rollouts: list[Sequence], read: PixelReader | None = None) -> timing.Run:
    plan = plan_microbatches(rollouts, ranks=1, tokens_per_microbatch=TOKENS_PER_MICROBATCH, shape=policy.shape)[0]
    device = policy.head.weight.device
    batches = [pack([rollouts[i] for i in members], read).to(device) for members in plan]

    def run() -> dict[str, Any]:
        policy.zero_grad(set_to_none=True)
        loss = 0.0
        for batch in batches:
            logprobs, _ = policy(batch)
            part = logprobs.sum() / len(rollouts)
            part.backward()
            loss += float(part.detach())
        return {"loss": loss, "gradient": torch.cat([p.grad.flatten() for p in policy.parameters()])}

    return run


def case(policy: Policy, prompt: int, completion: int, count: int, *, wanted: float) -> timing.Case:
    def check(results: dict[str, Any]) -> None:
        ours, theirs = results.values()
        assert abs(ours["loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"])
        assert (ours["gradient"] - theirs["gradient"]).norm() <= 1e-5 * theirs["gradient"].norm()

    return timing.Case(
        name=f"prompt {prompt}, {count} completions of {completion}",
        runs={
            "shared": update(policy, sequences(prompt, completion, count, share=True)),
            "a prompt each": update(policy, sequences(prompt, completion, count, share=False)),
        },
        check=check,
        wanted={"a prompt each": wanted},
    )


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    policy = make_policy()
    yield case(policy, 512, 128, 8, wanted=2.5)
    yield case(policy, 1024, 64, 16, wanted=6.0)
    yield case(policy, 16, 512, 8, wanted=0.97)
    yield case(policy, 900, 350, 8, wanted=1.0)


if __name__ == "__main__":
    timing.main(__doc__, cases)
