"""Read and check `vllm_kwargs.speculative_config`, before any worker starts.

The section has vLLM's own keys. Invariant: with an accepted section, each token is drawn from the same distribution as
without speculation. On CPUs, where this is tested, the same seed also gives the same tokens, independent of other
requests. This module does not import vllm.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.tensor_files import cached_folder
from nemo_rl.models.quantization import FP8
from nemo_rl.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

KEY = "policy.generation.vllm_kwargs.speculative_config"
KNOWN_KEYS = (
    *("attention_backend", "code_revision", "disable_eagle_block_drop", "disable_padded_drafter_batch"),
    *("draft_sample_method", "draft_tensor_parallel_size", "dspark_draft_topk", "enable_adaptive_verification"),
    *("enforce_eager", "index_share_for_mtp_iteration", "kv_cache_dtype", "max_model_len", "method", "model"),
    *("moe_backend", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "parallel_drafting"),
    *("prompt_lookup_max", "prompt_lookup_min", "quantization", "rejection_sample_method", "revision"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_min_token_prob", "synthetic_acceptance_length", "synthetic_acceptance_rates"),
    *("use_heterogeneous_vocab", "use_local_argmax_reduction"),
)
"""Keys of vLLM's `SpeculativeConfig` that a configuration can set."""
ON_CPU = ("ngram", "draft_model", "eagle3", "mtp")
"""Methods that are tested with vLLM's CPU build."""
_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
_MOST_TOKENS = 128
"""Value of `vllm.v1.sample.rejection_sampler.MAX_SPEC_LEN`."""
_NUM_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class Speculation:
    """The section `speculative_config`."""

    values: Mapping[str, Any]

    @property
    def method(self) -> str | None:
        """The method, or None if vLLM chooses it from the draft model."""
        name = self.values.get("method")
        return "mtp" if isinstance(name, str) and name.endswith("_mtp") else name

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens proposed at a time for a request, or 1 if the model decides it."""
        return int(self.values.get("num_speculative_tokens") or 1)

    @property
    def loads_weights(self) -> bool:
        """Return True if the proposing weights are read from files, because no weight sync sends them."""
        return self.method not in _WITHOUT_MODEL


def speculation_of(engine_kwargs: Mapping[str, Any]) -> Speculation | None:
    """Return the section of an engine's arguments, or None without speculation.

    Raises:
        ConfigError: The section is not a mapping.
    """
    values = engine_kwargs.get("speculative_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{KEY}={values!r} is not a section. Write its keys, such as method: ngram.")
    return Speculation({str(key).replace("-", "_"): value for key, value in values.items()})


def proposes_by_trained_layers(policy: PolicyConfig) -> bool:
    """Return whether the policy's multi-token-prediction layers propose tokens. Every sync sends these layers."""
    generation = policy.generation
    if generation is None or generation.backend != "vllm" or not policy.megatron_cfg.enabled:
        return False
    speculation = speculation_of(generation.vllm_kwargs)
    return policy.megatron_cfg.mtp_num_layers > 0 and speculation is not None and speculation.method == "mtp"


def proposes_with_latent_attention(speculation: Speculation, model_has_it: bool) -> bool:
    """Return whether the layers that propose tokens have latent attention (DeepSeek's MLA).

    Args:
        model_has_it: Whether the policy's model has latent attention. With `mtp`, its own layers propose.
    """
    named = speculation.values.get("model")
    if not speculation.loads_weights:
        return False
    if named is None or speculation.method == "mtp":
        return model_has_it
    # The file is read without a configuration class, because transformers does not know the architectures of all heads.
    draft, _ = PretrainedConfig.get_config_dict(cached_folder(str(named)) or str(named))
    return any(part.get("kv_lora_rank") is not None for part in (draft, draft.get("text_config") or {}))


def check_speculation(policy: PolicyConfig, cluster: ClusterConfig, model: Any) -> None:
    """Check the speculative decoding settings of a policy.

    Args:
        policy: The `policy` section, with `generation`.
        cluster: The `cluster` section. Some methods are not supported on CPUs.
        model: Hugging Face configuration of the text model.

    Raises:
        ConfigError: vLLM does not support the settings, they would change the distribution of samples, or they do not
            match `policy.draft`. The message lists the problems.
    """
    speculation = speculation_of(policy.sampling.vllm_kwargs)
    if policy.draft.enabled:
        _check_trained(speculation, policy)
    if speculation is None:
        return
    problems = [
        *_wrong_values(speculation),
        *([] if policy.draft.enabled else _wrong_methods(speculation, model)),
        *(_wrong_layers(policy, model) if proposes_by_trained_layers(policy) else []),
        *_unproven(speculation),
        *_wrong_sizes(speculation, policy),
        *([] if cluster.uses_gpu else _unproven_on_cpu(speculation)),
    ]
    if not problems and isinstance(speculation.values.get("model"), str) and speculation.method == "draft_model":
        problems = list(_unfit_draft_model(speculation, policy, model))
    if not problems and not policy.draft.enabled and speculation.method == "eagle3":
        problems = list(_no_eagle_head(str(speculation.values["model"])))
    if problems:
        raise ConfigError("\n".join(f"{KEY}.{problem}" for problem in problems))
    if speculation.loads_weights and cluster.uses_gpu:
        logger.warning(
            "With %s.method=%s on GPUs the same seed may give other answers in a repeated or resumed run, from the "
            "same distribution. method=ngram repeats them.",
            KEY,
            speculation.method,
        )


def _no_eagle_head(name: str) -> Iterator[str]:
    """Yield a problem if local files do not contain an EAGLE-3 head, whose first layer joins states of the policy."""
    from nemo_rl.models.huggingface.tensor_files import TensorFiles

    files = sorted(Path(cached_folder(name) or name).glob("*.safetensors"))
    if files and not any(tensor.endswith("fc.weight") for tensor in TensorFiles(files).file_of):
        yield (
            f"model={name!r} is no EAGLE-3 head: its files have no tensor fc.weight. For a language model write "
            "method: draft_model."
        )


def _wrong_values(speculation: Speculation) -> Iterator[str]:
    values = speculation.values
    for key in values.keys() - set(KNOWN_KEYS):
        yield f"{key}: vLLM has no such key.{did_you_mean(key, KNOWN_KEYS)}"
    count = values.get("num_speculative_tokens")
    if count is None and speculation.method != "mtp":
        yield "num_speculative_tokens is missing. Write how many tokens are proposed at a time, such as 3."
    elif count is not None and (not isinstance(count, int) or not 1 <= count <= _MOST_TOKENS):
        yield f"num_speculative_tokens={count!r} must be a whole number from 1 to {_MOST_TOKENS}."
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    for key, value in (("prompt_lookup_min", least), ("prompt_lookup_max", most)):
        if value is not None and (not isinstance(value, int) or value < 1):
            yield f"{key}={value!r} must be a whole number of at least 1, the tokens that have to match."
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield f"prompt_lookup_min={least} is more than prompt_lookup_max={most}."


def _check_trained(speculation: Speculation | None, policy: PolicyConfig) -> None:
    """Refuse to train a draft model (`policy.draft`) that the engines do not use for proposals."""
    method = None if speculation is None else speculation.method
    if speculation is None or method != "eagle3":
        raise ConfigError(
            f"policy.draft.enabled=true trains an EAGLE-3 head, but {KEY}.method={method}. Write method: eagle3 and "
            "num_speculative_tokens there, or set policy.draft.enabled=false."
        )
    named = speculation.values.get("model")
    if named not in (None, policy.draft.model_name):
        raise ConfigError(
            f"{KEY}.model={named!r} is not policy.draft.model_name={policy.draft.model_name!r}, which the engines get "
            "from the trainer. Remove it."
        )


def _wrong_methods(speculation: Speculation, model: Any) -> Iterator[str]:
    method, named = speculation.method, speculation.values.get("model")
    if method is None and named is None:
        yield "method is missing. Write ngram, draft_model, eagle3 or mtp."
    elif method in ("draft_model", "eagle", "eagle3") and named is None:
        yield f"model is missing, which method={method} proposes with. Write its hub id or folder."
    elif method == "mtp" and named is None and not any(getattr(model, name, 0) for name in _NUM_MTP_LAYERS):
        yield "method=mtp, but the model has no layers that predict further tokens. Use ngram or a draft model."
    elif method == "suffix" and find_spec("arctic_inference") is None:
        yield "method=suffix needs the package arctic-inference, which is not installed. Use ngram."
    elif method == "suffix" and speculation.values.get("suffix_decoding_max_cached_requests") != 0:
        yield (
            "suffix_decoding_max_cached_requests must be 0: proposals from answers to earlier requests make the tokens "
            "of an answer depend on them, so no run could be repeated or resumed exactly."
        )


def _wrong_layers(policy: PolicyConfig, model: Any) -> Iterator[str]:
    """Yield problems of multi-token-prediction layers: layers that engines do not receive, or float8 weights."""
    if policy.generation is not None and policy.generation.engine.precision == FP8:
        yield (
            f"method=mtp with layers that are trained and float8 weights (policy.generation.engine.precision={FP8}) is "
            "not proven. Set the precision to auto, or policy.megatron_cfg.mtp_num_layers=0."
        )
    held = max(getattr(model, name, 0) or 0 for name in _NUM_MTP_LAYERS)
    sent = policy.megatron_cfg.num_mtp_modules
    if held != sent:
        yield (
            f"method=mtp with {held} layers in the engines' model, of which the policy sends {sent} "
            "(policy.megatron_cfg.mtp_num_layers). Set policy.hf_config_overrides.num_nextn_predict_layers to "
            f"{sent}, or train all of them."
        )


def _unproven(speculation: Speculation) -> Iterator[str]:
    values = speculation.values
    if values.get("rejection_sample_method", "standard") == "synthetic":
        yield "rejection_sample_method=synthetic accepts tokens at random, which changes what is sampled. Remove it."
    if values.get("num_speculative_tokens_per_batch_size"):
        yield (
            "num_speculative_tokens_per_batch_size makes the tokens of an answer depend on other requests, so "
            "no run could be repeated exactly. Write num_speculative_tokens only."
        )
    if values.get("max_model_len") is not None:
        yield "max_model_len would stop the proposals for all requests when one is longer. Remove it."


def _unproven_on_cpu(speculation: Speculation) -> Iterator[str]:
    values, method = speculation.values, speculation.method
    if method is not None and method not in ON_CPU:
        yield f"method={method} is not proven with vLLM's CPU build. Use {', '.join(ON_CPU)}, or GPUs."
    if values.get("draft_sample_method", "greedy") != "greedy":
        yield (
            f"draft_sample_method={values['draft_sample_method']}: vLLM's CPU build draws proposals without the seeds "
            "of the requests, so no run could be repeated exactly. Write greedy."
        )
    if values.get("rejection_sample_method", "standard") == "block":
        yield "rejection_sample_method=block is not in vLLM's CPU build. Write standard."
    for key in ("parallel_drafting", "use_heterogeneous_vocab"):
        if values.get(key):
            yield f"{key} is not proven with vLLM's CPU build. Remove it, or use GPUs."


def _wrong_sizes(speculation: Speculation, policy: PolicyConfig) -> Iterator[str]:
    engine, vllm = policy.sampling.engine, policy.sampling.vllm_cfg
    for key in ("pipeline_parallel_size", "expert_parallel_size"):
        if getattr(engine, key) > 1:
            yield f"method with policy.generation.engine.{key}={getattr(engine, key)} is not proven. Set it to 1."
    own = speculation.values.get("draft_tensor_parallel_size")
    allowed = {engine.tensor_parallel_size} | ({1} if speculation.method != "draft_model" else set())
    if own is not None and own not in allowed:
        yield (
            f"draft_tensor_parallel_size={own!r} must be {' or '.join(map(str, sorted(allowed)))} (engine."
            f"tensor_parallel_size={engine.tensor_parallel_size})."
        )
    is_sent = policy.draft.enabled or proposes_by_trained_layers(policy)
    if speculation.loads_weights and not is_sent and vllm.sleep_level == 2:
        yield (
            "model would lose its weights when engines sleep (policy.generation.vllm_cfg.sleep_level=2), and no weight "
            "sync brings them back. Set sleep_level=1, or method=ngram."
        )


def _unfit_draft_model(speculation: Speculation, policy: PolicyConfig, model: Any) -> Iterator[str]:
    name, limit = str(speculation.values["model"]), policy.sampling.engine.max_model_len
    draft = load_model_config(name, section=KEY).get_text_config()
    sizes = draft.vocab_size, model.vocab_size
    if sizes[0] != sizes[1] and not speculation.values.get("use_heterogeneous_vocab"):
        yield f"model={name!r} has {sizes[0]} tokens, the policy's model {sizes[1]}. They must have the same tokenizer."
    positions = getattr(draft, "max_position_embeddings", None)
    if positions is not None and positions < limit:
        yield (
            f"model={name!r} has {positions} positions, fewer than policy.generation.engine.max_model_len={limit}. Use "
            "a draft model with as many, or a shorter context."
        )
