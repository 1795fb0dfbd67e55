"""vLLM's CPU build chooses libraries and kernels by the processor: the engine answers like Hugging Face with each.

torch's answers about the processor are replaced, so every choice that needs no more than this processor has is made
on any machine. A processor with AMX takes other kernels for bfloat16 only; float32 must not meet them.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    PROMPTS,
    ask,
    greedy_reference,
    make_mixture,
    make_model,
    make_settings,
    save_model,
    streamed,
)
from mtp_models import WithMTP
from speculating import SPEC
from torch import Tensor
from transformers import PreTrainedModel
from vllm_looks import attention_backends, loaded_extensions

from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import WholeWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

AMX, AVX512, BF16 = "_is_amx_tile_supported", "_is_avx512_supported", "_is_avx512_bf16_supported"
NOTHING = dict.fromkeys((AMX, "_is_amx_fp16_supported", AVX512, BF16), False)
PROCESSORS = {
    "AMX": {AMX: True},
    "AVX-512 with bfloat16": {AMX: False},
    "AVX-512 without bfloat16": {AMX: False, BF16: False},
    "AVX2": NOTHING,
}
LIBRARIES = {"AVX-512 with bfloat16": "_C.", "AVX-512 without bfloat16": "_C_AVX512.", "AVX2": "_C_AVX2."}
TOKENS = 8


def needs(name: str) -> None:
    """Skip a processor whose instructions this one lacks."""
    if name == "AVX-512 with bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor has no AVX-512 with bfloat16")
    if name == "AVX-512 without bfloat16" and not torch.cpu._is_avx512_supported():
        pytest.skip("this processor has no AVX-512")


@pytest.mark.parametrize("name", PROCESSORS)
def test_float32_engines_answer_like_hugging_face(name: str, tmp_path: Path, sender) -> None:
    needs(name)
    save_model(tmp_path, make_model("qwen2", True, seed=1))
    settings = {"dense": make_settings(tmp_path, "vllm", load_weights=False)}
    with EngineProcess(settings, processor=PROCESSORS[name]) as engines:
        for seed in (2, 3):
            model = make_model("qwen2", True, seed=seed)
            check_answers(engines, sender, "dense", model, streamed(model), seed)
        assert engines.look("dense", attention_backends) == ["CPU_ATTN"]
        if name in LIBRARIES:
            (path,) = engines.look("dense", loaded_extensions)
            assert Path(path).name.startswith(LIBRARIES[name])


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("name", PROCESSORS)
def test_float32_engines_with_latent_attention_and_experts_answer_like_hugging_face(
    name: str, tmp_path: Path, sender
) -> None:
    """The rotary embeddings are plain; those of `test_vllm_engine` are scaled, and computed by another function."""
    needs(name)
    save_model(tmp_path, make_mixture("deepseek_v3", seed=1, rope_parameters=PLAIN))
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    settings = {
        "plain": make_settings(tmp_path, "vllm", load_weights=False),
        "proposing": make_settings(tmp_path, "vllm", load_weights=False, engine_kwargs=speculation, trains_mtp=True),
    }
    with EngineProcess(settings, processor=PROCESSORS[name]) as engines:
        for seed in (2, 3):
            model = WithMTP(make_mixture("deepseek_v3", seed, rope_parameters=PLAIN), seed=seed)
            layers = model.hub_tensors(model.state_dict(), copies=False)
            sent = streamed(model.hf)
            check_answers(engines, sender, "plain", model.hf, sent, seed)
            sent |= {key: tensor.detach() for key, tensor in layers.items()}
            check_answers(engines, sender, "proposing", model.hf, sent, seed)
        assert [engines.look(kind, attention_backends) for kind in settings] == [["CPU_MLA"]] * 2


def check_answers(
    engines: EngineProcess, sender: WeightSender, kind: str, model: PreTrainedModel, sent: dict[str, Tensor], seed: int
) -> None:
    """Sync weights and compare greedy answers with those of the model."""
    assert engines.sync(kind, sender, SPEC, WholeWeights(sent.items), seed) == []
    requests = [ask(prompt, temperature=0.0, max_new_tokens=TOKENS) for prompt in PROMPTS]
    answers = [result.token_ids.tolist() for result in engines.generate(kind, requests)]
    assert answers == [greedy_reference(model, prompt, TOKENS) for prompt in PROMPTS]
