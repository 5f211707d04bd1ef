"""The engine in the process without vLLM: what a GPU would be told, against a stub, and prompts with images."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fastrl_fast.builtin import tiny_vlm
from fastrl_fast.config import Config, DataConfig, ModelConfig
from fastrl_fast.rollout import EngineSampler
from fastrl_fast.rollout.vllm_engine import VllmSampler, _engine_prompt, build_vllm
from fastrl_fast.types import Prompt
from fastrl_fast.vision import load_images


class StubLLM:
    """Takes note of the calls that vLLM's LLM would get."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        self.calls.append((method, {name: weight.dtype for name, weight in args[0]}))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_is_given_back_before_the_update_and_weights_come_before_the_cache(sleeps: bool) -> None:
    llm = StubLLM()
    sampler = VllmSampler(llm, None, dtype=torch.bfloat16, sleeps=sleeps)  # type: ignore[arg-type]
    assert isinstance(sampler, EngineSampler)
    taken = [("take_weights", {"a": torch.bfloat16}), "reset_prefix_cache"]
    sampler.load_weights([("a", torch.ones(2))])
    assert llm.calls == taken
    sampler.rest()
    sampler.rest()
    sampler.load_weights([("a", torch.ones(2))])
    asleep = [("sleep", 2), ("wake_up", "weights"), taken[0], ("wake_up", "kv_cache"), taken[1]]
    assert llm.calls[2:] == (asleep if sleeps else taken)


def test_images_are_handed_over_as_one_token_each(tmp_path: Path) -> None:
    """vLLM widens them again, as our own reader does."""
    tiny_vlm.write(tmp_path)
    tokenizer, model = tiny_vlm.byte_tokenizer(), ModelConfig(path=str(tmp_path))
    images = load_images(str(tmp_path), tokenizer, model, DataConfig(path="none"))
    assert images is not None
    files = []
    for size in ((80, 60), (40, 150)):
        buffer = io.BytesIO()
        Image.new("RGB", size, "white").save(buffer, "PNG")
        files.append(buffer.getvalue())
    text = f"Is {images.placeholder} above {images.placeholder}?"
    ids, pictures = images.place(tokenizer(text)["input_ids"], files)
    asked = _engine_prompt(Prompt("p", ids, text, {}, pictures))
    assert len(asked["prompt_token_ids"]) < len(ids)
    assert images.place(asked["prompt_token_ids"], files) == (ids, pictures)
    assert [image.size for image in asked["multi_modal_data"]["image"]] == [(80, 60), (40, 150)]
    assert _engine_prompt(Prompt("p", [1, 2], "", {})) == {"prompt_token_ids": [1, 2]}


def test_vllm_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = Config(model=ModelConfig(path="none"), data=DataConfig(path="none"))
    with pytest.raises(ValueError, match=r"rollout\.engine vllm needs vLLM: pip install 'fastrl_fast\[vllm\]'"):
        build_vllm(config, "none", None, None, dtype=torch.float32, barred=[])  # type: ignore[arg-type]
