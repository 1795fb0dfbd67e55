"""An exported folder in vLLM: its greedy answers are those of Hugging Face."""

import importlib.util
from pathlib import Path

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import PROMPTS, ask, greedy_reference, make_model, make_settings, save_model
from transformers import AutoModelForCausalLM

from nemo_rl.models.huggingface.export import export_checkpoint

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]


def test_greedy_answers_of_an_exported_folder_equal_hugging_face(tmp_path: Path) -> None:
    save_model(tmp_path / "weights/model", make_model("qwen2", True, seed=21))
    export_checkpoint(tmp_path / "weights", tmp_path / "hf", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.dtype == torch.float32
    expected = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    with EngineProcess({"exported": make_settings(tmp_path / "hf", "vllm", load_weights=True)}) as engine:
        results = engine.generate("exported", [ask(prompt, temperature=0.0) for prompt in PROMPTS])
    assert [result.token_ids for result in results] == expected
    assert len({tuple(result.token_ids) for result in results}) == len(PROMPTS), "the prompts matter"
