"""Nothing runs that was not named: no code in data, models, checkpoints or templates, and nobody's files are lost."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

import fastrl_fast
from fastrl_fast import cli
from fastrl_fast.checkpoint import load_weights
from fastrl_fast.config import DataConfig, ModelConfig
from fastrl_fast.data import PromptData, load_rows
from fastrl_fast.demo import MODEL_DIR
from fastrl_fast.model import load_causal_lm, load_tokenizer
from fastrl_fast.rewards import Grader
from fastrl_fast.rewards.registry import find
from fastrl_fast.run_folder import open_run_folder

PACKAGE = Path(fastrl_fast.__file__).parent
SETTINGS = ModelConfig(path="m")

DANGEROUS = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads", "torch.load"}
DANGEROUS |= {"yaml.unsafe_load", "yaml.full_load", "shelve.open", "joblib.load", "numpy.load", "dcp.load"}
ALLOWED = {("rewards/wire.py", "pickle.loads")}
"""Over pipes between a process and its own child alone."""


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_no_call_of_the_package_runs_what_it_reads() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in DANGEROUS:
                    found.add((name, called))
                shell = [k for k in node.keywords if k.arg == "shell" and ast.unparse(k.value) != "False"]
                assert not shell, f"{name} starts a shell"
                if called == "yaml.load":
                    loader = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
                    assert loader == "_StrictLoader", f"{name}: {ast.unparse(node)}"  # a SafeLoader
    assert found == ALLOWED


def test_a_checkpoint_that_is_a_pickle_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    size = len(bomb := pickle.dumps(Bomb(tmp_path / "ran")))
    (folder / "rank_00000.safetensors").write_bytes(bomb)
    (folder / ".metadata").write_bytes(bomb)
    files = {"rank_00000.safetensors": [size, __import__("zlib").crc32(bomb)]}
    (folder / "state.json").write_text(json.dumps({"format": 2, "ranks": 1, "files": files, "state": {"step": 1}}))
    with pytest.raises(ValueError, match=r"step_000001 cannot be read"):
        load_weights(folder)
    assert not (tmp_path / "ran").exists()


def model_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_in_a_model_folder_does_not_run(tmp_path: Path) -> None:
    mine = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    folder = model_folder(tmp_path / "model", auto_map=mine, model_type="mine")
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    assert SETTINGS.trust_remote_code is False
    with pytest.raises(ValueError, match=r"^model\.path: cannot load the model .*trust_remote_code"):
        load_causal_lm(str(folder), SETTINGS)
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_a_pickle_do_not_run(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|cannot load"):
        load_causal_lm(str(folder), SETTINGS)
    assert not (tmp_path / "ran").exists()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('RAN') }}",
    "{% for m in messages %}{{ m.__class__.__base__.__subclasses__() }}{% endfor %}",
    "{{ messages.append(messages) }}",
    "{{ ().__reduce_ex__(2) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_reach_python(template: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(MODEL_DIR), SETTINGS)
    tokenizer.chat_template = template.replace("RAN", str(tmp_path / "ran"))
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"^data\.path: row 1 of .* is refused by the chat template"):
        PromptData(DataConfig(path=str(tmp_path / "d.jsonl"), prompts_per_step=1), tokenizer, seed=0)
    assert not (tmp_path / "ran").exists()


def test_a_row_is_text_to_the_template_and_never_a_template(tmp_path: Path) -> None:
    evil = "{{ cycler.__init__.__globals__.os.mkdir('x') }} $(touch x) `touch x` ; touch x"
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": evil, "answer": evil}) + "\n")
    tokenizer = load_tokenizer(str(MODEL_DIR), SETTINGS)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    data = PromptData(DataConfig(path=str(tmp_path / "d.jsonl"), prompts_per_step=1), tokenizer, seed=0)
    (prompt,) = data.first(1)
    assert prompt.text == evil and tokenizer.decode(prompt.token_ids) == evil


def test_a_data_set_folder_with_a_script_does_not_run_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(ValueError, match=r"^data\.path: "):
        load_rows(str(folder), "train")
    assert not (tmp_path / "ran").exists()


def test_a_config_cannot_build_python_objects(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"model: !!python/object/apply:os.mkdir [{tmp_path / 'ran'}]\n")
    with pytest.raises(ValueError, match=r"--config: .* is not valid YAML"):
        cli.parse(["--config", str(tmp_path / "c.yaml")], prog="train")
    assert not (tmp_path / "ran").exists()


def test_a_reward_file_runs_only_when_it_is_named_and_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    code = f"import os\nopen({str(ran)!r}, 'a').write(f'{{os.getpid()}}\\n')\ndef f(completions, **c): return [1.0]\n"
    (tmp_path / "math.py").write_text(code)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for name in ("math", "exact"):
        with Grader([type("Term", (), {"name": name, "weight": 1.0})()], workers=1, timeout=20) as grader:
            grader.grade(["p"], ["c"], {"answer": ["1"]})
    assert not ran.exists(), "a file beside the run is not a reward"
    find("math.py:f")
    assert not ran.exists(), "naming it in a config does not import it here"
    with Grader([type("Term", (), {"name": "math.py:f", "weight": 1.0})()], workers=1, timeout=20) as grader:
        grader.grade(["p"], ["c"], {})
        assert set(map(int, ran.read_text().split())) <= set(grader.worker_pids()), "not in this process"


def test_a_run_folder_is_never_overwritten_unasked(tmp_path: Path) -> None:
    settings = cli.to_dict(cli.parse(["--run_dir", str(tmp_path / "r")], prog="train")[0])
    folder = open_run_folder(settings, "demo", total_steps=3)
    (folder / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(ValueError, match="holds a run with seed = 0, not 1; choose another run_dir or --overwrite"):
        open_run_folder(settings | {"seed": 1}, "demo", total_steps=3)
    open_run_folder(settings, "demo", total_steps=3)
    assert (folder / "metrics.jsonl").read_text() == "kept\n", "the same settings go on"
    open_run_folder(settings | {"seed": 1, "overwrite": True}, "demo", total_steps=3)
    assert not (folder / "metrics.jsonl").exists()
