"""The layout of the library: layers, places of backends, public re-exports, sizes.

Read with `ast`, so nothing needs to be importable for the layout itself. Invariant: the exception lists here may only
shrink; a stale exception fails too.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from package_source import PACKAGE, ROOT, files, tree_of

from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.runs.service import ServiceMasterConfig

LAYERS: list[set[str]] = [
    {"config", "utils", "host", "files", "compat", "optimizations"},
    {"distributed"},
    {"losses", "data", "weight_sync"},
    {"models"},
    {"environments"},
    {"experience"},
    {"algorithms", "evals"},
    {"launch"},
    {"sandbox"},
    {"kits"},
    {"agents"},
    {"serving"},
    {"commands"},
]
"""Packages from the lowest layer. The core ends with `launch`: it never imports the optional packages above it, and
names their classes by dotted paths."""
SHARED_LAYERS = [{"config", "utils", "host", "files", "compat", "optimizations"}]
"""Packages of one layer that may import each other, as long as no circle of files arises."""

LEVELS: dict[str, list[set[str]]] = {
    "config": [{"base"}, {"schema"}, {"rules"}, {"runs"}, {"loading"}],
    "algorithms": [
        {"runtime"},
        {"setup"},
        {"rollout", "credit", "supervised"},
        {"recipe", "scoring", "teaching"},
        {"start", "kto", "answer_scores"},
        {"grpo", "ppo", "distillation", "sft", "dpo", "rm"},
        {"advantage_estimator", "reward_functions", "utils", "loss"},
    ],
}
"""Levels within a package: its folders and files, from the lowest; entries of one level do not know each other."""

UPWARD_IMPORTS: set[tuple[str, str]] = set()
"""(file, imported module) pairs that break the layers; may only shrink."""

BACKENDS = ("vllm", "wandb", "mlflow", "megatron", "sglang", "transformer_engine", "flash_attn", "swanlab", "trackio")
CUDA_PLACES = ("host/device.py", "weight_sync/", "models/generation/vllm/", "models/megatron/")
CUDA_EXCEPTIONS = {"config/schema/cluster.py": "declares the key cluster.device, whose values are cuda and cpu"}

BROAD_EXCEPTS = {
    "host/boundary.py": "`Boundary` and `raised_as`, which other files use in place of `except Exception`",
    "algorithms/runtime/run.py": "what the recovery raises keeps the failure as its context",
    "optimizations/fork_server.py": "the process ends in its `finally`, whatever the program that was forked raises",
    "kits/code/inside/checks.py": "runs next to the model's code, without this library",
    "kits/code/inside/offers.py": "runs next to the model's code, without this library",
    "kits/code/inside/peer.py": "runs next to the model's code, without this library",
    "kits/code/inside/session.py": "runs next to the model's code, without this library",
    "models/generation/engine_group.py": "the last of several kinds of failures of an engine",
    "models/huggingface/reachable.py": "the last of several kinds of errors of the hub's library",
}
"""Files that catch everything without a `Boundary`, and why they do."""
BOUNDARIES = 52
"""Blocks whose errors may be of any kind, each with the reason in a comment."""

MAX_FILES_IN_A_FOLDER = 16
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "nemo_rl": ("LossInputType", "LossType", "chat_batch", "check_invariance", "open_policy", "token_loss"),
    "nemo_rl.algorithms.advantage_estimator": ("GRPOAdvantageEstimator", "GeneralizedAdvantageEstimator"),
    "nemo_rl.algorithms.distillation": ("DistillationConfig", "MasterConfig", "check_vocab_equality"),
    "nemo_rl.algorithms.grpo": (),
    "nemo_rl.algorithms.loss": ("ClippedPGLossFn", "NLLLossFn", "PreferenceLossFn", "DPOLossFn", "DistillationLossFn"),
    "nemo_rl.algorithms.ppo": ("AsyncPPOConfig", "MasterConfig", "PPOConfig", "PPOLoggerConfig", "PPOSaveState"),
    "nemo_rl.algorithms.reward_functions": ("apply_reward_shaping",),
    "nemo_rl.algorithms.utils": ("masked_mean", "calculate_kl", "set_seed", "get_tokenizer"),
    "nemo_rl.data.collate_fn": (),
    "nemo_rl.data": ("DataConfig",),
    "nemo_rl.data.datasets": ("AllTaskProcessedDataset", "load_eval_dataset", "load_response_dataset"),
    "nemo_rl.data.utils": ("setup_response_data", "setup_preference_data"),
    "nemo_rl.data.interfaces": ("DatumSpec", "ImagePart", "TaskDataSpec", "TextPart"),
    "nemo_rl.data.llm_message_utils": (),
    "nemo_rl.data.packing": (),
    "nemo_rl.distributed.batched_data_dict": ("BatchedDataDict",),
    "nemo_rl.distributed.named_sharding": ("NamedSharding",),
    "nemo_rl.distributed.ray_actor_environment_registry": ("ACTOR_ENVIRONMENT_REGISTRY", "get_actor_python_env"),
    "nemo_rl.distributed.virtual_cluster": ("RayVirtualCluster", "init_ray"),
    "nemo_rl.distributed.worker_groups": ("RayWorkerGroup",),
    "nemo_rl.environments.interfaces": ("EnvironmentInterface", "EnvironmentReturn", "EpisodeStart"),
    "nemo_rl.environments.games.sliding_puzzle": ("SlidingPuzzleEnv", "SlidingPuzzleGameLogic"),
    "nemo_rl.environments.math_environment": ("MathEnvironment",),
    "nemo_rl.environments.reward_model_environment": ("RewardModelEnvironment", "RewardModelEnvironmentConfig"),
    "nemo_rl.kits.tools.interfaces": ("EpisodeTools",),
    "nemo_rl.environments.tools.retriever": ("BM25Retriever", "RAGEnvironment"),
    "nemo_rl.evals.eval": ("EvalConfig", "MasterConfig", "evaluate", "pass_at_k", "consensus_at_k"),
    "nemo_rl.experience.rollouts": (),
    "nemo_rl.models.generation": ("GenerationInterface", "SamplingParams", "configure_generation_config"),
    "nemo_rl.models.generation.vllm": ("VllmConfig", "VllmGeneration"),
    "nemo_rl.models.generation.interfaces": ("GenerationInterface",),
    "nemo_rl.models.policy": ("PolicyConfig", "TokenizerConfig", "DTensorConfig"),
    "nemo_rl.models.policy.lm_policy": ("Policy",),
    "nemo_rl.utils.checkpoint": ("CheckpointManager", "CheckpointingConfig"),
    "nemo_rl.utils.config": ("load_config", "parse_hydra_overrides", "register_omegaconf_resolvers"),
    "nemo_rl.utils.native_checkpoint": ("convert_dcp_to_hf",),
    "nemo_rl.utils.logger": ("Logger", "LoggerInterface", "LoggerConfig", "flatten_dict", "get_next_experiment_dir"),
    "nemo_rl.utils.venvs": ("create_local_venv",),
    "nemo_rl.utils.timer": ("Timer", "TimeoutChecker", "convert_to_seconds"),
}
PLANNED_PATHS = [
    "nemo_rl.utils.nsys",
]
RE_EXPORTS = ["algorithms/advantage_estimator.py", "algorithms/reward_functions.py", "algorithms/utils.py"]
MAX_RE_EXPORT_LINES = 40


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@cache
def imports_of(file: Path, *, with_typing: bool = False) -> list[str]:
    """Return names a file imports at run time (or `with_typing` for type checkers), `from a import b` as both."""
    return list(_imports_in(file, with_typing))


def _imports_in(file: Path, with_typing: bool) -> Iterator[str]:
    blocks = [] if with_typing else [block for block in ast.walk(tree_of(file)) if is_typing_block(block)]
    skipped = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree_of(file)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def layer_of(package: str) -> int:
    return next(level for level, packages in enumerate(LAYERS) if package in packages)


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the constants that are docstrings or strings on their own line."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_every_package_is_in_a_layer():
    packages = {entry.name for entry in PACKAGE.iterdir() if entry.is_dir() and entry.name != "__pycache__"}
    assert packages <= set().union(*LAYERS)
    assert {entry.name for entry in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_files_import_from_their_own_package_or_a_lower_layer():
    found = set()
    for file in files():
        if file.parent == PACKAGE:
            continue
        package = file.relative_to(PACKAGE).parts[0]
        for module in imports_of(file):
            if not module.startswith("nemo_rl."):
                continue
            other = module.split(".")[1]
            shared = any({package, other} <= packages for packages in SHARED_LAYERS)
            if other != package and not shared and layer_of(other) >= layer_of(package):
                found.add((name_of(file), module))
    assert found == UPWARD_IMPORTS


@pytest.mark.parametrize("package", LEVELS)
def test_imports_inside_a_package_run_one_way(package):
    levels = {name: level for level, names in enumerate(LEVELS[package]) for name in names}
    entries = {path.name.removesuffix(".py") for path in (PACKAGE / package).iterdir()}
    assert entries - {"__init__", "__pycache__"} == levels.keys()
    found = set()
    for file in files():
        own = file.relative_to(PACKAGE).with_suffix("").parts
        if own[0] != package or own[1] == "__init__":
            continue
        for module in imports_of(file, with_typing=True):
            parts = module.split(".")
            if parts[:2] != ["nemo_rl", package]:
                continue
            other = parts[2] if len(parts) > 2 and parts[2] in levels else None
            if other is None and parts != ["nemo_rl", package]:
                other = "__init__"
            if other not in (None, own[1]) and (other == "__init__" or levels[other] >= levels[own[1]]):
                found.add((name_of(file), module))
    assert found == set()


MODEL_ARROWS: dict[str, set[str]] = {
    "accepted_rows": set(),
    "adapters": {"huggingface", "training"},
    "attention": set(),
    "batch_rows": set(),
    "expert_routing": set(),
    "huggingface": set(),
    "draft.shape": set(),
    "quantization": {"draft.shape", "huggingface"},
    "capacity": {"draft", "huggingface", "quantization"},
    "training": {"attention", "expert_routing"},
    "training.backends": {"accepted_rows", "capacity", "huggingface"},
    "draft": {"attention", "draft.shape", "huggingface", "training"},
    "dtensor": {
        *("accepted_rows", "adapters", "attention", "capacity", "draft", "expert_routing", "huggingface"),
        *("training", "training.backends"),
    },
    "megatron": {
        *("accepted_rows", "attention", "capacity", "draft", "expert_routing", "huggingface"),
        *("training", "training.backends"),
    },
    "policy.interfaces": {"batch_rows"},
    "policy.workers": {"adapters", "batch_rows", "huggingface", "training"},
    "policy": {"adapters", "batch_rows", "policy.interfaces", "policy.workers", "training", "training.backends"},
    "generation": {
        *("accepted_rows", "adapters", "attention", "capacity", "draft", "draft.shape", "huggingface"),
        *("quantization", "training"),
    },
    "generation.megatron": {"attention", "generation", "huggingface", "megatron", "training"},
}
"""Parts of `nemo_rl.models`, lowest first, and the parts that each imports; policy, backends and engines never meet,
but for the engine that is Megatron Core's model, which nothing imports."""


def model_part(module: str) -> str:
    """Return the part of `nemo_rl.models` that a dotted name below it belongs to."""
    return max((part for part in MODEL_ARROWS if f"{module}.".startswith(f"{part}.")), key=len)


def test_imports_inside_models_run_one_way():
    arrows: dict[str, set[str]] = {part: set() for part in MODEL_ARROWS}
    known = {module_name(file) for file in files()}
    for file in (PACKAGE / "models").rglob("*.py"):
        if file.parent == PACKAGE / "models" and file.stem == "__init__":
            continue
        part = model_part(module_name(file).removeprefix("nemo_rl.models."))
        targets = [name for name in imports_of(file) if name in known and name.startswith("nemo_rl.models.")]
        arrows[part] |= {model_part(name.removeprefix("nemo_rl.models.")) for name in targets} - {part}
    assert arrows == MODEL_ARROWS
    assert find_circle(arrows) is None


RANK_READERS = {
    "distributed/ranks/collectives.py": "each rank's place in the group of a collective",
    "models/dtensor/checkpoints/model_files.py": "one rank writes for all, or ranks that hold the same take turns",
    "models/dtensor/proof/numbers.py": "asks the layout what a rank of a proof is there for",
    "models/dtensor/checkpoints/training_state.py": "one rank writes for all",
    "models/draft/head.py": "one rank writes for all",
    "models/dtensor/build.py": "one rank finds out for all",
    "models/huggingface/folders.py": "one rank writes for all",
    "models/megatron/checkpoints/run_state.py": "one rank writes for all",
    "models/megatron/checkpoints/torch_dist.py": "one rank writes for all",
    "models/training/torch_backend.py": "each rank has its own random numbers",
    "models/policy/workers/rank.py": "asks the layout what this rank is there for",
}


def test_only_listed_files_read_the_rank():
    """`get_rank()` gives the process number; `ParallelLayout` gives its role."""
    readers = {
        name_of(file)
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr == "get_rank"
    }
    assert readers == set(RANK_READERS)


def test_files_import_without_cycles():
    modules = {module_name(file): file for file in files()}
    edges = {
        name: {target for target in imports_of(file) if target in modules and target != name}
        for name, file in modules.items()
    }
    assert find_circle(edges) is None


def module_name(file: Path) -> str:
    dotted = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return dotted.removesuffix(".__init__")


def find_circle(edges: dict[str, set[str]]) -> list[str] | None:
    """Return a cycle of imports, or None: repeatedly drop files that import nothing that is left."""
    left = {name: set(targets) for name, targets in edges.items()}
    while left:
        leaves = {name for name, targets in left.items() if not targets & left.keys()}
        if not leaves:
            return sorted(left)
        for name in leaves:
            del left[name]
    return None


def test_the_cycle_finder_finds_cycles():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_imported_only_in_their_packages(backend):
    misplaced = [
        name_of(file)
        for file in files()
        if any(module.split(".")[0] == backend for module in imports_of(file))
        and backend not in file.relative_to(PACKAGE).with_suffix("").parts
    ]
    assert misplaced == []


def test_cuda_appears_only_in_listed_files():
    writers = {
        name_of(file)
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"cuda(:\d+)?", node.value)
        and id(node) not in docstrings(tree_of(file))
        and not name_of(file).startswith(CUDA_PLACES)
    }
    assert writers == set(CUDA_EXCEPTIONS)


def test_the_library_does_not_print():
    printers = [
        f"{name_of(file)}:{node.lineno}"
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")
    ]
    assert printers == []


def catches_everything(node: ast.AST) -> bool:
    """Return whether a handler ends errors of any kind; one that only cleans up ends with a plain `raise`."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
    leaves = any(isinstance(each, ast.Return | ast.Break | ast.Continue) for each in ast.walk(node))
    passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None and not leaves
    return broad and not passes_on


def test_only_listed_files_catch_everything_without_a_boundary():
    catchers = {name_of(file) for file in files() if any(map(catches_everything, ast.walk(tree_of(file))))}
    assert catchers == set(BROAD_EXCEPTS)


def test_each_boundary_says_why_errors_may_be_of_any_kind():
    calls = [
        (file, node)
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Boundary", "raised_as")
    ]
    lines = {file: file.read_text().splitlines() for file, _ in calls}
    silent = [
        f"{name_of(file)}:{node.lineno}"
        for file, node in calls
        if not any("# " in line for line in lines[file][node.lineno - 2 : node.end_lineno + 1])
    ]
    assert silent == []
    assert len(calls) == BOUNDARIES, "boundaries may only get fewer"


def test_folders_stay_small():
    wide = {
        folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py")))
        for folder in (PACKAGE, *PACKAGE.rglob("*/"))
        if len(list(folder.glob("*.py"))) > MAX_FILES_IN_A_FOLDER
    }
    assert wide == {}


def test_files_and_functions_stay_small():
    long_files = {
        name_of(file) for file in files() if len(file.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    }
    long_functions = {
        f"{name_of(file)}:{node.name}"
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long_files == set(LONG_FILES)
    assert long_functions == set(LONG_FUNCTIONS)


@pytest.mark.parametrize("path", RE_EXPORTS)
def test_re_exports_define_nothing(path):
    tree = tree_of(PACKAGE / path)
    assert len((PACKAGE / path).read_text().splitlines()) <= MAX_RE_EXPORT_LINES
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def test_every_file_has_a_docstring():
    assert [name_of(file) for file in files() if not ast.get_docstring(tree_of(file))] == []


def test_no_registry_hosts_are_named():
    """The machine configures where packages come from."""
    hosts = re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", r"anaconda" + r"\.org", "index" + "-url"]))
    texts = [
        path
        for folder in ("nemo_rl", "examples", "tests", "tools", "docs", "docker", "infra", "requirements", "3rdparty")
        for path in (ROOT / folder).rglob("*")
        if path.name == "Dockerfile" or path.suffix in (".py", ".md", ".yaml", ".toml", ".sh", ".txt")
    ]
    texts += [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml"]
    assert len(texts) > 100
    assert [str(path) for path in texts if hosts.search(path.read_text(encoding="utf-8", errors="replace"))] == []


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_paths_export_their_names(module):
    imported = importlib.import_module(module)
    assert [name for name in PUBLIC_NAMES[module] if not hasattr(imported, name)] == []


def test_public_paths_load_no_backend():
    """Importing all public paths loads none of the backend libraries, so they need not be installed."""
    code = f"""
import importlib, sys
for module in {list(PUBLIC_NAMES)!r}:
    importlib.import_module(module)
loaded = set({BACKENDS!r}) & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_config_needs_neither_torch_nor_ray():
    code = "import sys, nemo_rl.config; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", PLANNED_PATHS)
def test_planned_paths_do_not_exist_yet(module):
    """When one of these arrives, move it to PUBLIC_NAMES."""
    path = ROOT / module.replace(".", "/")
    assert not path.with_suffix(".py").exists() and not path.exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_example_configs_load_through_their_schema(path):
    """A file's name begins with its algorithm, or with that of a variant of GRPO."""
    if path.stem.startswith("serve"):
        assert load_config(path, schema=ServiceMasterConfig).policy.model_name
        return
    algorithm = algorithm_of(path)
    config = load_config(path, schema=ALGORITHMS[algorithm])
    begins = re.split("[_.-]", path.stem)[0]
    others = {"grpo": ("gdpo", "prorlv2", "vlm")}
    assert path.parent.name == "evals" or begins == algorithm or begins in others.get(algorithm, ())
    assert config.policy.model_name
