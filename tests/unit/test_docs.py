"""The documentation tells the truth where a test can tell: paths, links, names, commands, metrics, code."""

import ast
import contextlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

import nemo_rl
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.rollout.source import Group
from nemo_rl.config import ClippedPGLossConfig, load_config
from nemo_rl.experience.metrics import rollout_metrics, validation_metrics
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.launch.programs import PROGRAMS
from nemo_rl.launch.python_runs import _NAMES_OF_TRL
from nemo_rl.losses.invariance import check_invariance

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDE = ROOT / "docs/algorithms/grpo.md"
ADDING = ROOT / "docs/development/adding-things.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page):
    named = re.findall(
        r"(?<![\w/-])((?:nemo_rl|examples|tests|tools|docs)/[\w./-]*\.(?:py|yaml|md|txt))\b", text_of(page)
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_names_in_files_exist():
    """`file.py::name` is a class, function or variable at the top of the file."""
    places = [place for page in PAGES for place in re.findall(r"(nemo_rl/[\w/]+\.py)::(\w+)", text_of(page))]
    assert len(places) > 15
    assert [f"{file}::{name}" for file, name in places if name not in top_level_names(ROOT / file)] == []


def test_tests_that_a_page_names_exist():
    """`test_file.py::test_name`, or `::test_name` of the file that was named last."""
    named = re.findall(r"`(test_\w+\.py)?::(test_\w+)`", text_of(ROOT / "docs/development/gpu-readiness.md"))
    assert len(named) > 20
    file = ""
    for given, name in named:
        file = given or file
        [path] = (ROOT / "tests").rglob(file)
        assert name in top_level_names(path), f"{file}::{name}"


def top_level_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize(("algorithm", "most"), [("GRPO", 18), ("SFT", 13)])
def test_a_step_is_read_in_few_files(algorithm, most):
    page = text_of(ROOT / "docs/development/one-training-step.md")
    listed = re.search(rf"^{algorithm}:\n\n((?:\d+\. .*\n)+)", page, flags=re.MULTILINE)
    assert listed is not None
    named = re.findall(r"^\d+\. `([\w/.]+)`: ", listed[1], flags=re.MULTILINE)
    assert len(named) == len(listed[1].splitlines()) == len(set(named)) <= most
    assert named[0] == f"examples/run_{algorithm.lower()}.py"


def test_ci_runs_the_test_command_of_the_readme():
    """Each part of the command is a line of its own there."""
    commands = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines() if "pytest" in line]
    (command,) = commands
    lines = [re.sub(r" --quiet\b| -q\b", "", line).strip() for line in text_of(ROOT / ".ci/run").splitlines()]
    assert [part for part in command.split(" && ") if part.strip() not in lines] == []


def test_all_emitted_metrics_are_in_the_guide():
    documented = set(re.findall(r"`([\w/]+)`", text_of(GUIDE).partition("\n## Metrics\n")[2]))
    assert emitted_metrics() - documented == set()


def emitted_metrics() -> set[str]:
    message = {
        "role": "assistant",
        "content": "4",
        "token_ids": torch.tensor([1]),
        "generation_logprobs": torch.zeros(1),
    }
    trajectory = Trajectory(0, 0, 0, "math", [message], prompt_length=0, reward=1.0)
    _, loss_metrics = ClippedPGLossFn(ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0))(
        torch.zeros(1, 2), policy_rows(1), 1.0, 2.0
    )
    return {*rollout_metrics([trajectory]), *validation_metrics([trajectory], num_generations=2), *loss_metrics}


def policy_rows(num_rows: int) -> dict[str, torch.Tensor]:
    """A policy-gradient microbatch of three tokens a row."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(num_rows, 3)
    mask[:, 0] = 0
    return {
        "advantages": torch.randn(num_rows, 3, generator=generator),
        "generation_logprobs": -torch.rand(num_rows, 3, generator=generator),
        "token_mask": mask,
        "sample_mask": torch.ones(num_rows),
    }


@pytest.fixture(scope="module")
def shown() -> dict:
    """What the Python blocks of `adding-things.md` define, all but those that start a run."""
    namespace: dict = {"__name__": "adding_things"}
    for block in blocks(ADDING, "python"):
        if "_train(run)" not in block:
            exec(compile(block, str(ADDING), "exec"), namespace)
    return namespace


def test_the_shown_environment_grades(shown):
    environment = shown["MyEnvironment"]({"bonus": 0.5})
    logs = [[{"role": "assistant", "content": "it is 4"}], [{"role": "assistant", "content": "it may well be five"}]]
    returned = environment.step(logs, [{"ground_truth": "4"}, {"ground_truth": "4"}])
    assert returned.rewards.tolist() == [1.5, 0.5]
    assert returned.terminateds.all()


def test_the_shown_advantage_picks_the_best_of_each_group(shown):
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.2, 9.0])
    extras = {"group_ids": torch.tensor([0, 0, 1, 1, 1]), "valid_mask": torch.tensor([1.0, 1, 1, 1, 0])}
    advantages = shown["BestOfGroup"]().compute_advantage(None, rewards, torch.ones(5, 2), **extras)
    assert advantages.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0], [0, 0]]


def test_the_shown_turn_returns_are_those_computed_by_hand(shown):
    """Three turns with rewards 1, 0 and 4, then one with reward 2, at a discount of 0.5."""
    extras = {
        "turn_rewards": torch.tensor([[1.0, 0.0, 4.0], [2.0, 0.0, 0.0]]),
        "turn_spans": torch.tensor([[[1, 3], [4, 5], [6, 8]], [[2, 4], [0, 0], [0, 0]]]),
    }
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0]])
    advantages = shown["DiscountedTurns"](discount=0.5).compute_advantage(None, None, mask, **extras)
    assert advantages.tolist() == [[0, 2, 2, 0, 2, 0, 4, 4], [0, 0, 2, 2, 0, 0, 0, 0]]


def test_the_shown_loss_is_invariant(shown):
    logprobs = -torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
    check_invariance(shown["RewardWeightedLoss"](), logprobs, policy_rows(4))


def test_the_shown_rollout_source_leaves_out_truncated_groups(shown):
    class Inner:
        metrics = {"asked": 1.0}
        max_staleness = 3

        def next_groups(self, step):
            outcomes = ["truncated", "truncated", "finished", "truncated"]
            made = [Trajectory(row // 2, row % 2, row, "math", [], 0) for row in range(4)]
            for trajectory, outcome in zip(made, outcomes, strict=True):
                trajectory.outcome = outcome
            yield from (Group((0, group), made[2 * group : 2 * group + 2]) for group in range(2))

    source = shown["WithoutTruncated"](Inner())
    assert [(group.order, group.trains) for group in source.next_groups(1)] == [((0, 0), False), ((0, 1), True)]
    assert source.metrics == {"asked": 1.0, "num_groups_kept": 1.0}
    assert source.max_staleness == 3


def test_the_shown_data_set_has_rows(shown):
    assert shown["MyData"](seed=1).dataset[0]["messages"][-1]["content"] == "4"


def test_the_parts_for_another_trainer_run_without_ray():
    """In a process of its own; each printed line is the comment after its `print`."""
    *parts, engine, rollouts = blocks(ROOT / "docs/start/parts.md", "python")
    code = "".join([*parts, 'import sys\nassert "ray" not in sys.modules\n', engine, rollouts])
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    script = code + "import ray\nassert not ray.is_initialized()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == expected and len(expected) == 5


def test_the_blocks_for_users_of_nemo_rl_run(monkeypatch, capsys):
    """One after the other, up to the start of the workers."""
    page = ROOT / "docs/start/coming-from-nemo-rl.md"
    started = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "nemo_rl.algorithms.grpo.start_run", lambda *parts: started.append(parts) or contextlib.nullcontext(parts)
    )
    namespace: dict = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, str(page), "exec"), namespace)
        if number == 0:
            namespace["grpo_train"] = lambda run: None
    ((config, recipe, _),) = started
    assert recipe.tokenizer is namespace["tokenizer"]
    assert recipe.data.train is namespace["dataset"]
    assert recipe.data.validation is namespace["val_dataset"]
    assert config.env["math"].num_workers == 1
    assert namespace["config"].policy.optimizer.kwargs == {"lr": 1e-5}
    assert capsys.readouterr().out.strip() in text_of(page)


def test_the_page_for_users_of_trl_has_the_names_of_the_error_messages_and_keys_that_exist():
    page = ROOT / "docs/start/from-trl.md"
    rows = [[set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")] for row in blocks_of_rows(page)]
    for theirs, ours in _NAMES_OF_TRL.items():
        is_trl = theirs != "rewards"
        assert not is_trl or any(theirs in cells[1] and ours in cells[2] for cells in rows), theirs
    named = {name.split("=")[0] for cells in rows for cell in cells[2:] for name in cell}
    keys = {
        name
        for name in named
        if re.fullmatch(r"(policy|loss_fn|data|logger|checkpointing|cluster|grpo|sft|dpo)\..+", name)
    }
    programs = [PROGRAMS[name] for name in ("grpo", "sft", "dpo")]
    configs = [load_config(program.config_for_this_machine(), schema=program.schema) for program in programs]
    assert len(keys) > 50
    assert [key for key in sorted(keys) if not any(has_value(config, key) for config in configs)] == []


def test_the_page_for_users_of_trl_has_the_defaults_of_the_base_files():
    text = (ROOT / "docs/start/from-trl.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"### Defaults\n(.*?)\n#", text, flags=re.DOTALL)
    configs = {
        name: load_config(f"examples/configs/{file}.yaml", schema=PROGRAMS[name].schema)
        for name, file in (("grpo", "grpo_math_1B"), ("sft", "sft"), ("dpo", "dpo"))
    }
    named = re.findall(r"`([\w.]+)=([^`]+)`", table)
    assert len(named) > 10
    for key, value in named:
        found = [value_of(config, key) for config in configs.values() if has_value(config, key)]
        assert json.loads(value) in found, key
    optimizers = [config.policy.optimizer.kwargs for config in configs.values()]
    assert [kwargs["lr"] for kwargs in optimizers] == [5e-6] * 3
    assert [kwargs["weight_decay"] for kwargs in optimizers] == [0.01, 0.1, 0.1]
    assert [config.policy.scheduler is None for config in configs.values()] == [False, True, False]
    assert configs["grpo"].policy.sampling.memory_share == 0.6


def blocks_of_rows(page: Path) -> list[str]:
    """The lines of all tables without their heads."""
    return [line for line in without_blocks(page).splitlines() if line.startswith("| ") and line.count("|") > 2]


def has_value(config: object, key: str) -> bool:
    for name in key.split("."):
        if isinstance(config, dict):
            return name in config or name == "weight_decay"
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def value_of(config: object, key: str) -> object:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def test_the_example_for_users_of_trl_gives_rewards(monkeypatch):
    (block,) = blocks(ROOT / "docs/start/from-trl.md", "python")
    called = []
    signature = inspect.signature(nemo_rl.grpo)

    def grpo(*arguments, **keys):
        called.append(signature.bind(*arguments, **keys).arguments)
        return SimpleNamespace(metrics={"train/reward": 1.0}, model=None)

    monkeypatch.setattr(nemo_rl, "grpo", grpo)
    exec(compile(block, "from-trl.md", "exec"), {})
    (given,) = called
    (right, (short, weight)) = given["reward"].values()
    assert right(["it is 20", "21"], given["rows"][:2]) == [1.0, 1.0] and right(["22"], given["rows"][:1]) == [0.0]
    assert short(["a", "a" * 99], given["rows"][:2]) == [1.0, 0.0] and weight == 0.1


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("shown_class", "line", "steps"),
    [
        ("class Fluency", "with_critic = replace(", 2),
        ("class OneStepAhead", "run.source.rollouts = OneStepAhead", 3),
    ],
)
def test_the_shown_run_trains(tmp_path, shown_class, line, steps):
    """As a reader would: the class and the lines that start the run, in a script."""
    wanted = (shown_class, line)
    script = "\n\n".join(block for block in blocks(ADDING, "python") if any(text in block for text in wanted))
    (tmp_path / "my_run.py").write_text(script)
    subprocess.run([sys.executable, "my_run.py"], cwd=tmp_path, check=True, timeout=240)
    (folder,) = tmp_path.glob("logs/exp_*")
    assert len(list(folder.glob("train_data_step*.jsonl"))) == steps
    logged = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row["metrics"] for row in logged if row["prefix"] == "train"]
    assert len(trained) == steps
    if shown_class == "class Fluency":
        assert all(-20 < metrics["fluency"] < 0 for metrics in trained)
    if shown_class == "class OneStepAhead":
        assert [metrics["avg_trajectory_age"] for metrics in trained] == [0.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.ray
def test_the_shown_rows_with_an_extra_input_train(tmp_path, shown):
    """As a reader would, on two data-parallel ranks: the module, its section of the configuration, and the script."""
    project = tmp_path / "my_project"
    project.mkdir()
    for name, text in (("my_project/sensor_model.py", "class SensorModel"), ("run.py", "import sensor_processor")):
        (block,) = [block for block in blocks(ADDING, "python") if text in block]
        (tmp_path / name).write_text(block)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat")
    slot = tokenizer.convert_tokens_to_ids("!")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "sensor_token_id": slot}
    torch.manual_seed(0)
    shown["SensorForCausalLM"](shown["SensorConfig"](**sizes)).save_pretrained(project / "sensor-model")
    tokenizer.save_pretrained(project / "sensor-model")
    (section,) = [text for text in blocks(ADDING, "yaml") if "SensorTraining" in text]
    config = yaml.safe_load(section) | {
        "defaults": str(ROOT / "examples/configs/sft_cpu.yaml"),
        "sft": {"max_num_steps": 3, "val_period": 0, "val_at_end": False},
        "cluster": {"ranks_per_node": 2},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": "logs", "tensorboard_enabled": False},
    }
    config["policy"] |= {"train_global_batch_size": 8, "train_micro_batch_size": 2}
    (project / "sensor_sft.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = [json.loads(row) for row in next(tmp_path.glob("logs/exp_*/metrics.jsonl")).read_text().splitlines()]
    trained = [row["metrics"] for row in logged if row["prefix"] == "train"]
    assert len(trained) == 3
    assert trained[-1]["loss"] < trained[0]["loss"]


@pytest.mark.slow
@pytest.mark.ray
def test_the_shown_backend_and_engine_run_together(tmp_path):
    """With their own sections of the page in one file: the engine samples from the table that the backend trains."""
    (tmp_path / "my_project").mkdir()
    for module, name in (("table_backend", "TableRank"), ("my_engine", "BigramEngine")):
        (block,) = [block for block in blocks(ADDING, "python") if f"class {name}" in block]
        (tmp_path / "my_project" / f"{module}.py").write_text(block)
    shown = [yaml.safe_load(block).get("policy", {}) for block in blocks(ADDING, "yaml")]
    backend = next(each for each in shown if "TableTraining" in str(each.get("training_backend")))
    engine = next(each for each in shown if "BigramEngine" in str(each.get("generation")))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat")
    backend["training_backend"]["kwargs"]["vocab_size"] = len(tokenizer)
    config = {
        "defaults": str(ROOT / "examples/configs/grpo_math_cpu.yaml"),
        "policy": {**backend, **engine, "train_global_batch_size": 8},
        "grpo": {"max_num_steps": 2, "num_prompts_per_step": 2, "num_generations_per_prompt": 4, "val_at_start": False},
        "checkpointing": {"checkpoint_dir": "saved", "save_period": 2},
    }
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "examples/run_grpo.py"), "--config", "both.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = [json.loads(row) for row in next(tmp_path.glob("logs/exp_*/metrics.jsonl")).read_text().splitlines()]
    errors = [row["metrics"]["token_mult_prob_error"] for row in logged if row["prefix"] == "train"]
    assert errors == pytest.approx([1.0, 1.0], abs=1e-4)
    assert load_file(tmp_path / "saved/step_2/policy/weights/table.safetensors").keys() == {"weight"}


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_library():
    """A quoted message, whose `...` stand for what varies, is part of one text in the source."""
    page = ROOT / "docs/start/troubleshooting.md"
    tables = re.findall(r"^\| message contains .*\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), flags=re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split("|")[1]) if " " in message]
    assert len(tables) == 8 and len(quoted) >= len(rows)
    assert [message for message in quoted if len(message.replace("...", "").strip()) < 9] == []
    texts = set(library_texts())
    assert [message for message in quoted if not is_in_one_of(texts, message)] == []


def is_in_one_of(texts: set[str], message: str) -> bool:
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    pattern = re.compile(".*".join(pieces), flags=re.DOTALL)
    return any(pattern.search(text) for text in texts)


def library_texts():
    """Strings of the library's source; a formatted one with `{}` for each value in it."""
    for file in (ROOT / "nemo_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
