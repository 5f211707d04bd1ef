"""Settings and their command line: defaults, help, recipes, round trips, and one clear line for every mistake."""

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fastrl_fast import cli, foreign_names, plain_yaml
from fastrl_fast.config import Config


@pytest.fixture(autouse=True, scope="module")
def one_parser():
    """Building the parser takes a tenth of a second, and this file parses some two hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_parser", functools.cache(cli._parser))
        yield


def parse(*argv: str) -> Config:
    return cli.parse(list(argv), prog="train")[0]


def mistake(*argv: str) -> str:
    """The one line that a mistake is answered with."""
    with pytest.raises(ValueError) as error:
        parse(*argv)
    line = str(error.value)
    assert "\n" not in line and line.strip()
    for noise in ("Union", "subtype", "<class", "NoneType", "functools", "Traceback", "Parser key", "typing."):
        assert noise not in line, line
    return line


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


BASE = "model: {path: m}\ndata: {path: d}\n"


def settings_fields(cls: type = Config, prefix: str = "") -> list[tuple[type, str, str]]:
    found = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            found += settings_fields(field.type, f"{prefix}{field.name}.")
        else:
            found.append((cls, field.name, prefix + field.name))
    return found


def test_defaults_are_those_that_the_documentation_promises(file):
    c = parse("--config", file(BASE))
    assert (c.prune.method, c.prune.tau, c.prune.weighting) == ("mdap", 0.8, "none")
    assert (c.budget.kind, c.budget.group_size, c.advantage.preset) == ("fixed", 8, "fastrl")
    assert (c.loss.kind, c.loss.kl_coef, c.updates.minibatches, c.updates.epochs) == ("grpo", 0.0, 1, 1)
    assert (c.seed, c.max_steps, c.run_dir, c.overwrite) == (0, None, None, False)
    assert c.reward.functions == {"math": 1.0, "format": 0.5}
    assert [(t.name, t.weight) for t in c.reward.terms] == [("math", 1.0), ("format", 0.5)]


def test_every_section_is_frozen_and_keyword_only():
    for cls in {owner for owner, _, _ in settings_fields()}:
        assert cls.__dataclass_params__.frozen, cls
        kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, cls
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().seed = 1


def test_help_holds_the_docstring_of_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = "".join(capsys.readouterr().out.split())
    for owner, name, dotted in settings_fields():
        body = inspect.getsource(owner)
        match = re.search(rf'^    {name}: .*\n    """(.*?)"""', body, re.MULTILINE | re.DOTALL)
        assert match, f"{dotted} has no docstring"
        assert f"--{dotted}" in text
        assert "".join(match[1].split()) in text, f"the help of {dotted} is not its docstring"
    assert text.count("CONFIG") == 1, "no section has a file of its own"
    for recipe in cli.recipe_names():
        assert recipe in text


def test_print_config_is_read_back(capsys, file):
    argv = ["--optimizer.lr", "3e-7", "--reward.functions", "{my.py:f: 2}", "--data.system_prompt", "yes: 'no' ä\n#"]
    argv += ["--rollout.stop_token_ids", "[1,2]", "--optimizer.betas", "[0.8,0.95]", "--run_dir", "007"]
    with pytest.raises(SystemExit):
        parse(*argv, "--print_config")
    printed = file(capsys.readouterr().out)
    assert parse("--config", printed) == parse(*argv)
    assert parse(*argv).data.system_prompt == "yes: 'no' ä\n#"


def test_a_config_as_text_is_read_back(file):
    c = parse(
        "--loss.kind",
        "dapo",
        "--max_steps",
        "7",
        "--reward.functions",
        "{a: 1}",
        "--eval.reward",
        "a",
        "--log.trackers",
        "[wandb]",
    )
    text = plain_yaml.dump(cli.to_dict(c))
    assert parse("--config", file(text)) == c
    assert yaml.safe_load(text) == cli.to_dict(c)


def test_no_arguments_mean_the_demo():
    c, recipe = cli.parse([], prog="train")
    assert recipe == "demo" and c.model.path == "builtin:demo"


@pytest.mark.parametrize("name", cli.recipe_names())
def test_recipes_parse_alone_or_behind_one_with_a_model(name):
    tree = yaml.safe_load(cli.recipe_path(name).read_text())
    alone = "model" in tree and "data" in tree
    c, recipe = cli.parse(["--config", name] if alone else ["--config", "demo", f"--config={name}"], prog="train")
    assert recipe == (name if alone else f"demo+{name}")
    for key in cli._flatten(tree):
        ours, theirs = c, tree
        for part in key.split("."):
            ours, theirs = getattr(ours, part), theirs[part]
        assert ours == (theirs if theirs is None else type(ours)(theirs)), f"{key} of {name} arrived"


@pytest.mark.parametrize("name", cli.recipe_names())
def test_a_method_behind_weights_that_it_does_not_know_is_not_refused(name, file):
    mine = file(BASE + "prune: {method: mdap, weighting: multiplicity}\n")
    c, _ = cli.parse(["--config", mine, "--config", name], prog="train")
    assert c.prune.weighting != "multiplicity" or c.prune.method in ("mdap", "mdap_seed", "aero_mdap", "none")


def test_recipes_are_there():
    assert "demo" in cli.recipe_names()


def test_later_files_win_and_overrides_win_over_all(file):
    mine = file("optimizer: {lr: 5e-7}\nreward: {functions: {math: 1.0}}\nseed: 3\n")
    c, recipe = cli.parse(["--seed", "9", "--config", "demo", "--config", mine], prog="train")
    assert recipe == "demo+mine"
    assert (c.optimizer.lr, c.seed, c.model.path) == (5e-7, 9, "builtin:demo")
    assert c.reward.functions == {"math": 1.0}, "a mapping of rewards is replaced, not merged"


def test_a_single_reward_weight_can_be_set():
    given = parse("--reward.functions", "{exact: 1, format: 0.5}", "--reward.functions.format", "0.25")
    assert given.reward.functions == {"exact": 1.0, "format": 0.25}


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-06", "0.000001"])
def test_exponents_without_a_point_are_numbers(text, file):
    """X01: YAML 1.1 reads 1e-6 as a string."""
    c = parse("--config", file(f"{BASE}optimizer: {{lr: {text}}}\n"))
    assert c.optimizer.lr == 1e-6 and isinstance(c.optimizer.lr, float)
    assert parse("--optimizer.lr", text).optimizer.lr == 1e-6


def test_whole_numbers_become_floats_where_floats_are_meant(file):
    lr = parse("--config", file(f"{BASE}optimizer: {{lr: 1}}\n")).optimizer.lr
    assert lr == 1.0 and isinstance(lr, float)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--max_steps", "3.5"], "max_steps must be a whole number or null, got 3.5"),
        (["--seed", "1e3"], "seed must be a whole number, got 1000.0"),
        (["--data.shuffle", "maybe"], "data.shuffle must be true or false, got maybe"),
        (["--log.trackers", "[foo]"], "log.trackers must be a list, each one of tensorboard, wandb, trackio, got foo"),
        (["--rollout.stop_token_ids", "[1,x]"], "rollout.stop_token_ids must be a list, each a whole number, got x"),
        (["--optimizer.lr", "fast"], "optimizer.lr must be a finite number, got fast"),
        (["--optimizer.lr", "nan"], "optimizer.lr must be a finite number, got nan"),
        (["--optimizer.betas", "[0.9]"], "optimizer.betas must be a list of 2, each a finite number, got [0.9]"),
        (["--model.dtype", "float16"], "model.dtype must be one of float32, bfloat16, got float16"),
        (
            ["--loss.kind", "ppo"],
            "loss.kind must be one of grpo, dapo, dr_grpo, gspo, gspo_token, cispo, got ppo",
        ),
        (
            ["--loss.aggregation", "x"],
            "loss.aggregation must be one of token-mean, seq-mean-token-mean, seq-mean-token-sum-norm or null, got x",
        ),
        (["--reward.functions", "3"], "reward.functions must be a mapping of names, each to a finite number, got 3"),
    ],
)
def test_wrong_types_name_field_rule_and_value(argv, line):
    assert mistake(*argv) == line


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--optimizer.lr", ".inf"], "optimizer.lr must be finite, got inf"),
        (["--loss.kl_coef", ".inf"], "loss.kl_coef must be finite, got inf"),
        (["--reward.functions", "{math: .nan}"], "reward.functions.math must be finite, got nan"),
        (["--prune.tau", "2"], "prune.tau must be in [0, 1], got 2.0"),
        (
            ["--budget.group_size", "1"],
            "budget.group_size must be 2 or greater (a group of one has no advantage), got 1",
        ),
        (["--rollout.temperature", "0"], "rollout.temperature must be greater than 0, got 0.0"),
        (["--rollout.top_p", "0"], "rollout.top_p must be in (0, 1], got 0.0"),
        (["--rollout.top_k", "-1"], "rollout.top_k must be 0 or greater, got -1"),
        (["--rollout.min_p", "1"], "rollout.min_p must be in [0, 1), got 1.0"),
        (["--optimizer.betas", "[0.9,1]"], "optimizer.betas must be two numbers in [0, 1), got (0.9, 1.0)"),
        (["--loss.dual_clip", "1"], "loss.dual_clip must be greater than 1, got 1.0"),
        (["--loss.importance.cap", "0"], "loss.importance.cap must be greater than 0, got 0.0"),
        (["--loss.importance.floor", "3"], "loss.importance.floor must be in [0, loss.importance.cap (2.0)], got 3.0"),
        (["--rollout.engine", "vllm_server"], "rollout.vllm.servers must be at least one URL, got []"),
        (
            ["--rollout.vllm.servers", "[node3:8000]"],
            "rollout.vllm.servers must be made of URLs that begin with http:// or https://, got 'node3:8000'",
        ),
        (
            ["--rollout.engine=vllm_server", "--rollout.vllm.servers=[http://a:1]", "--rollout.vllm.weights=folder"],
            "rollout.vllm.weights_folder must be a folder where rollout.vllm.weights is folder, got None",
        ),
        (["--rollout.vllm.patience", "0"], "rollout.vllm.patience must be greater than 0, got 0.0"),
        (
            ["--loss.kind", "gspo", "--loss.importance.kind", "token_mask"],
            "loss.importance.kind must be none or of sequences where loss.kind is gspo, got 'token_mask'",
        ),
        (
            ["--updates.old_logprobs", "rollout", "--loss.importance.kind", "token_truncate"],
            "loss.importance.kind must be none where updates.old_logprobs is rollout: the ratio itself corrects, "
            "got 'token_truncate'",
        ),
        (["--loss.clip_low", "-0.1"], "loss.clip_low must be 0 or greater, got -0.1"),
        (["--data.prompts_per_step", "0"], "data.prompts_per_step must be greater than 0, got 0"),
        (["--max_steps", "0"], "max_steps must be greater than 0, got 0"),
        (["--epochs", "0"], "epochs must be greater than 0, got 0"),
        (["--seed", "-1"], "seed must be 0 or greater, got -1"),
        (["--checkpoint.keep", "0"], "checkpoint.keep must be greater than 0, got 0"),
        (["--eval.every", "-1"], "eval.every must be 0 or greater, got -1"),
        (["--reward.timeout", "0"], "reward.timeout must be greater than 0, got 0.0"),
        (["--reward.functions", "{}"], "reward.functions must be a non-empty mapping of names to weights, got {}"),
        (
            ["--reward.functions", "{a: 1, b: 2}", "--eval.reward", "x"],
            "eval.reward must be one of reward.functions (a, b), got 'x'",
        ),
        (
            ["--data.prompts_per_step", "4", "--updates.minibatches", "5"],
            "updates.minibatches must be at most data.prompts_per_step (4), got 5",
        ),
    ],
)
def test_wrong_values_name_field_rule_and_value(argv, line):
    """X07, A03: before any model is loaded."""
    assert mistake(*argv) == line


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("max_step", "did you mean 'max_steps'?"),
        ("optimizer.lrr", "did you mean 'optimizer.lr'?"),
        ("prune.methd", "did you mean 'prune.method'?"),
        ("lr", "it is called 'optimizer.lr' here"),
        ("num_generations", "it is called 'budget.group_size' here"),
        ("beta", "it is called 'loss.kl_coef' here"),
        ("epsilon_high", "it is called 'loss.clip_high' here"),
        ("rollout.n", "it is called 'budget.group_size' here"),
        ("clip_ratio_high", "it is called 'loss.clip_high' here"),
        ("actor_rollout_ref.actor.clip_ratio_high", "it is called 'loss.clip_high' here"),
        ("algorithm.adv_estimator", "it is called 'advantage.preset' here"),
        ("n_samples_per_prompt", "it is called 'budget.group_size' here"),
        ("init_kl_coef", "it is called 'loss.kl_coef' here"),
    ],
)
def test_unknown_keys_are_answered_with_ours(key, answer, file):
    assert answer in mistake(f"--{key}", "1")
    assert answer in mistake(f"--{key}=1")
    tree: dict = {"x": 1}
    inner = tree
    *sections, last = key.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = 1
    del tree["x"]
    path = file(BASE + yaml.safe_dump(tree))
    line = mistake("--config", path)
    assert answer in line and key in line and path in line


def test_only_settings_are_suggested_never_sections():
    for key in ("data.foo", "dat", "prun", "log.x", "evl"):
        for suggestion in re.findall(r"(?:mean|called) '([^']+)'", mistake(f"--{key}", "1")):
            assert suggestion in [dotted for _, _, dotted in settings_fields()]
    assert mistake("--qqqqqq", "1") == "command line: unknown key 'qqqqqq'"


def test_every_translation_is_a_setting():
    settings = {dotted for _, _, dotted in settings_fields()}
    for table in (foreign_names.TRL, foreign_names.VERL, foreign_names.OPENRLHF):
        assert set(table.values()) <= settings
        # A name that is ours already would never be looked up.
        assert not set(table) & settings


@pytest.mark.parametrize(("setting", "value"), foreign_names.VALUES)
def test_a_value_of_another_trainer_is_answered_with_ours(setting, value):
    here = foreign_names.VALUES[setting, value]
    assert mistake(f"--{setting}", value).endswith(f", got {value}; it is called {here!r} here")
    section, name = setting.split(".")
    assert getattr(getattr(parse(f"--{setting}", here), section), name) == here


def test_sections_want_a_mapping(file):
    assert "'loss' is a section" in mistake("--config", file(BASE + "loss: 3\n"))
    assert "'loss' is a section" in mistake("--config", file(BASE + "loss:\n"))
    assert "loss.kl_coef" in mistake("--loss", "3")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must hold a mapping of settings, got None"),
        ("- 1\n", "must hold a mapping of settings, got [1]"),
        ("hello\n", "must hold a mapping of settings, got 'hello'"),
        ("a: [1\n", "is not valid YAML"),
        ("a:\n\t- b\n", "is not valid YAML"),
        (BASE + "optimizer: {lr: 1}\noptimizer: {weight_decay: 0}\n", "key 'optimizer' is given twice"),
        (BASE + "reward: {functions: {math: 1, math: 2}}\n", "key 'math' is given twice"),
        (BASE + "seed: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
    ],
)
def test_files_that_are_no_settings(text, rule, file):
    path = file(text)
    line = mistake("--config", path)
    assert line.startswith(f"--config: {path} ") and rule in line


def test_reward_names_are_text(file):
    line = mistake("--config", file(BASE + "reward: {functions: {1: 2}}\n"))
    assert line == "reward.functions must be a non-empty mapping of names to weights, got {1: 2.0}"


def test_dotted_keys_in_a_file_are_the_same_settings(file):
    c = parse("--config", file(BASE + "optimizer.lr: 0.5\nreward.functions: {exact: 2}\n"))
    assert (c.optimizer.lr, c.reward.functions) == (0.5, {"exact": 2.0})


def test_byte_order_mark_and_windows_line_ends(file):
    c = parse("--config", file(b"\xef\xbb\xbf" + (BASE + "seed: 4\n").replace("\n", "\r\n").encode()))
    assert (c.model.path, c.seed) == ("m", 4)


def test_missing_files_and_recipes():
    assert mistake("--config", "/no/such.yaml") == "--config: no such file '/no/such.yaml'"
    assert "did you mean 'demo'" in mistake("--config", "demi")
    assert "recipes are" in mistake("--config")


def test_missing_and_stray_arguments(file):
    assert "model.path" in mistake("--config", file("data: {path: d}\n"))
    assert "stray" in mistake("stray")
    assert "--model.path" in mistake("--model.path")


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("lambda: 0", 0, ""),
        ("lambda: 3", 3, ""),
        ("lambda: cli.recipe_path('a/b')", 2, "error: --config: no such file 'a/b'\n"),
        ("lambda: (_ for _ in ()).throw(KeyboardInterrupt)", 130, ""),
    ],
)
def test_exit_codes(body, code, stderr, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(eval(body))
    assert end.value.code == code
    assert capsys.readouterr().err == stderr


def test_a_value_error_of_another_library_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal"):
        cli.run(lambda: int("x"))


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: cli.recipe_path("a/b"))
    assert end.value.code == 2 and capsys.readouterr().err == ""


def test_torchruns_own_report_ends_with_the_mistake(tmp_path, monkeypatch, capsys):
    """Read by torch as torchrun does."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        cli.run(lambda: cli.recipe_path("a/b"))
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    *_, said, border = ChildFailedError("train", {1: failure}).format_msg().splitlines()
    assert said.split(" : ", 1)[1].startswith("error: --config: ") and set(border) == {"="}
    assert capsys.readouterr().err == ""


def test_a_mistake_is_told_before_anything_is_loaded(tmp_path):
    """Exit code 2 and one line, from a process that never gets as far as the model or the data."""
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['datasets'] = None\n"
        "from fastrl_fast import cli\n"
        "cli.run(lambda: cli.parse(['--num_generations', '4'], prog='train') and 0)\n"
    )
    root = Path(cli.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: command line: unknown key 'num_generations'; it is called 'budget.group_size' here\n"
    )
    assert not any(tmp_path.iterdir())


def test_text_that_no_file_can_hold():
    """As `$'--run_dir=\\xff'` arrives from a shell."""
    assert mistake("--run_dir=a\udcff") == "run_dir must be text that UTF-8 can hold, got 'a\\udcff'"
    assert "data.path" in mistake("--data.path", "\ud800")
