"""A row's rotary frequencies do not depend on the other rows of the batch."""

from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import hf_logprobs, policy_config, process_group, random_batch
from transformers import PreTrainedModel

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.models.policy.batching import logprob_strategy, shard_batch
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

ORIGINAL = 16
SHORT, LONG = [1.0] * 8, [3.0] * 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one_by_one": {"logprob_batch_size": 1},
    "padded_beyond_the_original_context": {"logprob_batch_size": 6, "make_sequence_length_divisible_by": 24},
    "packed": {"sequence_packing": {"enabled": True, "logprob_mb_tokens": 256}},
}


def _long_rope(model_type: str = "phi3", short: list[float] = SHORT, long: list[float] = LONG) -> PreTrainedModel:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    rope |= {"original_max_position_embeddings": ORIGINAL, "short_mscale": 1.2, "long_mscale": 1.4}
    original = {"original_max_position_embeddings": ORIGINAL} if model_type == "phi3" else {}
    return random_model(model_type, sliding_window=None, max_position_embeddings=64, rope_parameters=rope, **original)


def _dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return random_model("llama", max_position_embeddings=ORIGINAL, rope_parameters=rope)


def _scores(config, data) -> torch.Tensor:
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"), init_optimizer=False, init_reference_model=False)
        batch = shard_batch(data, 1, logprob_strategy(config))
        return batch.restore([PolicyWorker(backend, config).get_logprobs(batch.data[0], batch.sizes[0])])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("context", "width"), [(ORIGINAL, ORIGINAL), (64, 40)])
def test_long_rope_uses_one_set_of_factors_in_a_run(context, width, layout, tmp_path) -> None:
    _long_rope().save_pretrained(tmp_path)
    data = random_batch(rows=6, width=width)
    data["input_lengths"][1] = 9
    config = policy_config(str(tmp_path), max_total_sequence_length=context, **LAYOUTS[layout])
    factors = SHORT if context == ORIGINAL else LONG
    with torch.no_grad():
        want = hf_logprobs(_long_rope(short=factors, long=factors), data)
        other = hf_logprobs(_long_rope(short=LONG, long=SHORT), data)
    torch.testing.assert_close(_scores(config, data).double(), want, rtol=0, atol=1e-4)
    assert (other - want).abs().max() > 0.1, "the factors matter"


def test_the_context_of_the_engine_selects_the_factors_of_the_policy(tmp_path) -> None:
    _long_rope().save_pretrained(tmp_path)
    data = random_batch(rows=4, width=ORIGINAL)
    generation = {"vllm_cfg": {"max_model_len": ORIGINAL}, "max_new_tokens": 8}
    config = policy_config(str(tmp_path), max_total_sequence_length=64, generation=generation)
    with torch.no_grad():
        want = hf_logprobs(_long_rope(long=SHORT), data)
    torch.testing.assert_close(_scores(config, data).double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("model", "kind"), [(_dynamic, "dynamic"), (lambda: _long_rope("phimoe"), "longrope")])
def test_frequencies_that_follow_the_longest_row_are_refused_beyond_the_original_context(model, kind) -> None:
    fix_rotary_frequencies(model(), ORIGINAL)
    with pytest.raises(ConfigError, match=rf"\({kind}\).*max_total_sequence_length to at most {ORIGINAL}"):
        fix_rotary_frequencies(model(), ORIGINAL + 1)
