"""A saved adapter means the same to PEFT as to training, in dense models and next to fused experts."""

from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import policy_config, process_group
from tiny_models import make_char_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.adapters.lora_linear import adapted_modules
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.lora_export import adapter_source, export_merged
from nemo_rl.models.training.interfaces import CheckpointPaths

LORA: dict[str, Any] = {"enabled": True, "dim": 4, "alpha": 8, "dropout": 0.1}


def _logprobs(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 23)[None], use_cache=False).logits.double().log_softmax(-1)


@pytest.mark.parametrize("model_type", ["qwen2", "deepseek_v3", "qwen2_moe", "mixtral"])
def test_peft_computes_the_trained_policy_from_the_adapter(model_type, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    random_model(model_type).save_pretrained(base)
    make_char_tokenizer().save_pretrained(base)
    with process_group():
        backend = DTensorBackend(
            policy_config(str(base), dtensor_cfg={"lora_cfg": LORA}), torch.device("cpu"), init_optimizer=False
        )
        torch.manual_seed(0)
        for module in adapted_modules(backend.model.hf).values():
            torch.nn.init.normal_(module.lora_B, std=0.3)
        backend.save(CheckpointPaths(tmp_path))
        backend.model.eval()
        want = _logprobs(backend.model.hf)
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert (_logprobs(plain) - want).abs().max() > 1, "the adapter changes the model"
    torch.testing.assert_close(
        _logprobs(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()), want, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        _logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()), want, rtol=0, atol=1e-3
    )
    export_merged(adapter_source(tmp_path / "adapter"), tmp_path / "merged")
    torch.testing.assert_close(
        _logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()), want, rtol=0, atol=1e-3
    )
