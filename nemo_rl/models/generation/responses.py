"""Find the tokens that end responses, decode responses, and continue responses of an earlier run.

To continue a response, its tokens so far become a part of the prompt. The rest is sampled with another seed, because
the first seed would draw the random numbers of the tokens so far again. Invariant: the joined response has the tokens,
log-probabilities and weight versions of both parts, and ends where one response would have ended. Its experts
(`policy.router_replay`) for the tokens so far are those that the engine chose when it read them as a prompt.
"""

from bisect import bisect_left
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig as HubGenerationConfig
from transformers import PreTrainedTokenizerBase

from nemo_rl.config import GenerationConfig
from nemo_rl.files.hub_download import described_source
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
)
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.utils.seed import derive_seed


def sampled_text(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int] | NDArray[np.int32]) -> str:
    """Decode a response without special tokens, such as the token that ends a turn."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str), "one sequence gives one text"
    return text


def stop_token_ids(
    model_name: str,
    tokenizer_eos: int | None,
    configured: Sequence[int] | None,
    config_overrides: dict[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the stop tokens of the tokenizer, the model and the configuration, without duplicates.

    Chat models (Gemma, Llama 3, Phi, Qwen) often end a turn with another token than their tokenizer's end-of-sequence
    token. Their generation_config.json lists all such tokens. Models without that file list them in config.json.

    Args:
        model_name: Local folder or hub id.
        tokenizer_eos: `eos_token_id` of the tokenizer, if it has one.
        configured: Further ids from the run's configuration.
        config_overrides: Changes to the model's Hugging Face config.

    Raises:
        ConfigError: The model cannot be found.
    """
    try:
        generation = HubGenerationConfig.from_pretrained(described_source(model_name))
    except OSError:
        generation = HubGenerationConfig.from_model_config(load_model_config(model_name, config_overrides))
    of_model = generation.eos_token_id
    ids = [] if tokenizer_eos is None else [tokenizer_eos]
    ids += of_model if isinstance(of_model, list) else [] if of_model is None else [of_model]
    return tuple(dict.fromkeys([*ids, *(configured or ())]))


def rest_of(request: GenerationRequest, so_far: ResponseSoFar) -> GenerationRequest:
    """Return the request for the rest of a response, or the request itself if there are no tokens so far.

    Args:
        so_far: The first part of the response, shorter than `max_new_tokens`.
    """
    if not len(so_far):
        return request
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids + so_far.token_ids.tolist(),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(so_far)),
        seed=derive_seed(request.seed, "continued", len(so_far)),
    )


def joined(
    so_far: ResponseSoFar, rest: GenerationResult, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> GenerationResult:
    """Join the first part of a response with the rest. If there are no tokens so far, return the rest.

    Engines look for stop strings only in the tokens that they sample. This function therefore looks for a stop string
    that begins in the first part, and drops the tokens after it.

    Args:
        stops: The stop strings of the request.
        tokenizer: Decodes both parts.
    """
    if not len(so_far):
        return rest
    end = _end_at_stop(so_far.token_ids.tolist(), rest.token_ids.tolist(), stops, tokenizer)
    reason: FinishReason = rest.finish_reason if end == len(rest.token_ids) else "stop"
    kept = ResponseSoFar(
        rest.token_ids[:end], rest.logprobs[:end], [span for span in rest.weight_versions if span.start < end]
    )
    whole = so_far.followed_by(kept)
    dropped = len(rest.token_ids) - end
    experts = rest.routed_experts  # its prompt contains the tokens so far
    return GenerationResult(
        whole.token_ids,
        whole.logprobs,
        reason,
        whole.weight_versions,
        served_by=rest.served_by,
        routed_experts=experts if experts is None or not dropped else experts[:-dropped],
    )


def _end_at_stop(so_far: list[int], rest: list[int], stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens of the rest belong to the response: those up to the first stop string, or all."""

    def has_stop(end: int) -> bool:
        text = str(tokenizer.decode(so_far + rest[:end]))
        return any(stop in text for stop in stops)

    if not stops or not has_stop(len(rest)):
        return len(rest)
    return bisect_left(range(len(rest)), True, key=has_stop)


def configure_generation_config[Config: GenerationConfig | MutableMapping[str, Any]](
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    is_eval: bool = False,
    has_refit_draft_weights: bool = False,
    trains_mtp: bool = False,
) -> Config:
    """Fill in the token that ends an answer and, in a dict, the padding token. Runs call `stop_token_ids` themselves.

    NeMo RL has this function for programs that build `policy.generation` without its examples.

    Args:
        config: The section `policy.generation`, which is changed in place.
        is_eval: Has no effect. Engines of a run receive its weights, and engines of an evaluation load them.
        has_refit_draft_weights: Has no effect. Engines get the weights of `policy.draft` in every sync.
        trains_mtp: Has no effect. Engines that propose with the policy's own layers get these layers in every sync.

    Returns:
        `config`.
    """
    if config.get("stop_token_ids") is None and tokenizer.eos_token_id is not None:
        config["stop_token_ids"] = [tokenizer.eos_token_id]
    if not isinstance(config, GenerationConfig):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config
