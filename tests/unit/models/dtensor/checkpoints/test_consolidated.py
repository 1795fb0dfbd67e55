"""`checkpointing.save_consolidated` writes a folder for export that is complete whenever the checkpoint is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from policy_helpers import policy_config, process_group, save_tiny_model
from tiny_models import make_char_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config import CheckpointingConfig
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.rank_calls import RankCalls
from nemo_rl.models.training.backends import training_backend
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")


class InProcessPolicy(Policy):
    """A policy whose only rank is this process."""

    def __init__(self, config, backend: DTensorBackend) -> None:
        self.config, self.tokenizer, self._rank = config, make_char_tokenizer(), backend
        self._backend = training_backend(config)
        self._complete_checkpoint = None
        self.ranks = cast(RankCalls, SimpleNamespace(everywhere=self._save))

    def _save(self, method: str, phase: str, **kwargs: Any) -> list[Any]:
        optimizer = kwargs["optimizer_path"]
        self._rank.save(CheckpointPaths(Path(kwargs["weights_path"]), optimizer and Path(optimizer)))
        return [None]


@pytest.mark.parametrize(("precision", "lora"), [("bfloat16", False), ("float32", False), ("bfloat16", True)])
def test_the_consolidated_model_has_the_compute_precision(precision, lora, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_io, "MAX_FILE_BYTES", 100_000)
    name = save_tiny_model(tmp_path / "m", tie=True)
    config = policy_config(name, precision=precision, dtensor_cfg={"lora_cfg": {"enabled": lora}})
    weights = tmp_path / "weights"
    with process_group():
        backend = DTensorBackend(config, CPU)
        policy = InProcessPolicy(config, backend)
        policy.save_checkpoint(weights, tmp_path / "optimizer", consolidated=True)
        # The folder is not one of the checkpoint's own files: training resumes without it.
        backend.load(CheckpointPaths(weights, tmp_path / "optimizer"))
    folder = weights / "model/consolidated"
    exported, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    dtype = getattr(torch, precision)
    assert exported.dtype == dtype
    trained = AutoModelForCausalLM.from_pretrained(weights / "model")
    assert trained.dtype == torch.float32
    for key, parameter in trained.named_parameters():
        assert torch.equal(exported.get_parameter(key), parameter.to(dtype)), key
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == policy.tokenizer.get_vocab()
    assert AutoTokenizer.from_pretrained(folder).chat_template == policy.tokenizer.chat_template


def test_the_consolidated_model_is_written_only_on_request(tmp_path) -> None:
    assert CheckpointingConfig.build().save_consolidated is False
    config = policy_config(save_tiny_model(tmp_path / "m"))
    with process_group():
        InProcessPolicy(config, DTensorBackend(config, CPU)).save_checkpoint(tmp_path / "weights")
    assert not (tmp_path / "weights/model/consolidated").exists()
