"""Answers end at every token that the tokenizer, the model or the configuration names."""

import asyncio
from pathlib import Path

import pytest
from generation_helpers import PROMPTS, answered, ask, greedy_reference, make_model, make_settings, save_model
from transformers import GenerationConfig, PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.factory import sampling_params
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.responses import stop_token_ids
from nemo_rl.utils.errors import ConfigError

PUBLISHED = {
    "Gemma": (1, [1, 106], (1, 106)),
    "Llama 3": (128009, [128001, 128008, 128009], (128009, 128001, 128008)),
    "Qwen chat": (151645, [151645, 151643], (151645, 151643)),
    "Qwen base": (151643, 151643, (151643,)),
    "Phi": (32000, [32007, 32001, 32000], (32000, 32007, 32001)),
    "none of its own": (2, None, (2,)),
}
"""The tokenizer's token, the model's, and all of them."""


@pytest.mark.parametrize(("tokenizer_eos", "of_model", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_stop_tokens_are_the_union_of_tokenizer_and_generation_config(tmp_path, tokenizer_eos, of_model, expected):
    GenerationConfig(eos_token_id=of_model).save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path), tokenizer_eos, None) == expected
    assert stop_token_ids(str(tmp_path), tokenizer_eos, [7, tokenizer_eos]) == (*expected, 7)


def test_stop_tokens_come_from_the_model_config_without_a_generation_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a model folder"):
        stop_token_ids(str(tmp_path), 5, None)
    save_model(tmp_path, make_model("llama", False, seed=0))
    (tmp_path / "generation_config.json").unlink()
    config = PretrainedConfig.get_config_dict(tmp_path)[0]
    assert config["eos_token_id"] == 258
    assert stop_token_ids(str(tmp_path), None, None) == (258,)
    assert stop_token_ids(str(tmp_path), 5, [9], {"eos_token_id": [11, 12]}) == (5, 11, 12, 9)


def test_an_answer_ends_at_the_second_stop_token_and_keeps_it(tmp_path: Path) -> None:
    model = make_model("qwen2", True, seed=3)
    save_model(tmp_path, model)
    full = greedy_reference(model, PROMPTS[1], 12)
    GenerationConfig(eos_token_id=[258, full[4]]).save_pretrained(tmp_path)
    policy = PolicyConfig.build(
        model_name=str(tmp_path), max_total_sequence_length=64, generation={"backend": "hf"}, optimizer=None
    )
    stop = sampling_params(policy, 258, validation=False).stop_token_ids
    engine = HfEngine(make_settings(tmp_path, "hf"))
    (result,) = asyncio.run(answered(engine, [ask(PROMPTS[1], temperature=0.0, stop_token_ids=stop)]))
    assert (result.token_ids.tolist(), result.finish_reason) == (full[: full.index(full[4]) + 1], "stop")
