"""Cache of the meshes that have been proven on this machine, for all runs of a user.

Each proof is one empty file, named by a digest of everything that the proof depends on. Creating it is atomic, so
concurrent runs do not conflict. Invariant: a file means that a proof succeeded with exactly this code.
"""

import hashlib
import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

import nemo_rl
from nemo_rl.config import PolicyConfig
from nemo_rl.models.dtensor.proof.small import SmallMesh

logger = logging.getLogger(__name__)

_CODE = ("config/rules", "distributed", "models/attention", "models/dtensor", "models/huggingface", "models/*.py")
"""Files of the library that a proof runs."""
_PARALLEL_KEYS = (
    "sequence_parallel",
    "context_parallel_method",
    "custom_parallel_plan",
    "activation_checkpointing",
    "lora_cfg",
)
_OF_THE_RUN = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def digest(policy: PolicyConfig, mesh: SmallMesh, model: PretrainedConfig) -> str:
    """Return the digest of a proof, over the model's configuration, the small mesh, keys and versions of the code."""
    section = policy.dtensor_cfg.model_dump(mode="json", include={*_PARALLEL_KEYS})
    shape = {name: value for name, value in model.to_dict().items() if name not in _OF_THE_RUN}
    ingredients: list[Any] = [
        shape,
        section,
        mesh.layout.shape,
        mesh.layout.ep,
        mesh.virtual,
        policy.sequence_packing.enabled and policy.sequence_packing.share_prompts,
        policy.sequence_packing.enabled,
        policy.reward_model_cfg.enabled,
        policy.max_total_sequence_length,
        _context(policy),
        torch.__version__,
        transformers.__version__,
        _code(),
    ]
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _context(policy: PolicyConfig) -> int | None:
    engine = policy.generation.engine if policy.generation is not None else None
    return None if engine is None else engine.max_model_len


@cache
def _code() -> str:
    """Return a digest of the source files that a proof runs."""
    package = Path(nemo_rl.__file__).parent
    total = hashlib.sha256()
    for pattern in _CODE:
        files = package.glob(pattern) if "*" in pattern else (package / pattern).rglob("*.py")
        for file in sorted(files):
            total.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return total.hexdigest()


def folder() -> Path:
    """Return the folder of the proofs, below XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "nemo_rl" / "proven_meshes"


def is_proven(number: str) -> bool:
    """Return whether the proof with this digest is stored."""
    try:
        return (folder() / number).exists()
    except OSError:
        return False


def remember(number: str) -> None:
    """Store a proof; if the folder cannot be written, the next run repeats the proof."""
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder() / number).touch()
    except OSError as error:
        logger.debug("Cannot store the proof of this mesh: %s.", error)
