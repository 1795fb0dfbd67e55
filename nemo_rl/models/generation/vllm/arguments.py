"""Translate the library's settings of engines and requests into those of vLLM.

Invariant: `vllm_kwargs` of the configuration override every value here.

Float8 weights are described to vLLM in the form that a checkpoint uses, `quantization_config`. Sources:
`vllm.model_executor.layers.quantization.fp8.Fp8Config` (`weight_block_size`, names `weight_scale_inv`) and
`modelopt.ModelOptMxFp8Config` (names `weight_scale`, uint8). vLLM quantizes all linear layers except those that are
listed, so the list must contain every linear layer whose weights are sent unquantized. Invariant: the list and the sent
weights are both determined by `WeightQuantization.takes`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from nemo_rl.files.hub_download import described_source, pinned
from nemo_rl.files.trusted_code import may_run
from nemo_rl.models.generation.interfaces import EngineSettings, SamplingParams
from nemo_rl.models.generation.vllm.adapters.check import adapter_arguments
from nemo_rl.models.generation.vllm.drafting import TRAINED_LAYERS
from nemo_rl.models.generation.vllm.grammars import structured_outputs
from nemo_rl.models.generation.vllm.ranks import RanksExecutor
from nemo_rl.models.generation.vllm.settings import CPU_SEQUENCES
from nemo_rl.models.generation.vllm.speculation import speculation_of
from nemo_rl.models.generation.vllm.zero_mismatch.check import TYPES_OF_TRANSFORMERS
from nemo_rl.models.huggingface.load import load_model_config, reads_more_than_text
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.models.quantization import WeightQuantization

logger = logging.getLogger(__name__)

_MX_CAPABILITY = (10, 0)
"""First compute capability whose tensor cores support MXFP8 (Blackwell)."""
_EXPERT = "{}.0.gate_proj.weight"
"""Pattern of an expert's weight name in hub checkpoints. The name begins with that of the module of all experts."""


def quantization_config(quantization: WeightQuantization, unquantized: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` that replaces the one in the model's files.

    Args:
        unquantized: Names of the layers whose weights are sent unquantized.
    """
    block_format, ignored = quantization.block_format, sorted(unquantized)
    if block_format.scales == "e8m0":
        return {"quant_method": "mxfp8", "ignored_layers": ignored}
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_format.rows, block_format.columns],
        "ignored_layers": ignored,
    }


def warn_of_weights_only(quantization: WeightQuantization, capability: tuple[int, int]) -> None:
    """Warn if MXFP8 is used on a GPU without kernels for it. vLLM then rounds weights but not activations."""
    if quantization.block_format.scales == "e8m0" and capability < _MX_CAPABILITY:
        logger.warning(
            "policy.generation.vllm_cfg.is_mx=true: GPUs of compute capability %d.%d multiply no MXFP8 matrices. vLLM "
            "reads the weights in float8 and computes in 16 bits, which is slower than blocks of 128 x 128 and rounds "
            "no activations. Set is_mx=false, or use GPUs of capability 10.0 or later.",
            *capability,
        )


def unquantized_layers(model: PretrainedConfig, quantization: WeightQuantization) -> list[str]:
    """Return the names of linear layers and of lists of experts whose weights arrive unquantized.

    They are found in the Hugging Face model, built without memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built: nn.Module = AutoModelForCausalLM.from_config(model)
    names = []
    for name, module in built.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, torch.Tensor):
            if not quantization.takes(f"{name}.weight", tuple(weight.shape)):
                names.append(name)
        elif name.endswith(".experts") and not quantization.takes(_EXPERT.format(name), (1, 1)):
            names.append(name)
    return names


MOST_IMAGES = 64
"""Largest number of images of a prompt, unless `vllm_kwargs.limit_mm_per_prompt` is set."""
_CPU_BATCHED_TOKENS = 4096
_GRAPH_REQUESTS = 512
_MAX_GRAPH_REQUESTS = 1024
"""Number of requests that vLLM runs concurrently in offline generation on large GPUs."""
_DEEPSEEK_V3_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def engine_arguments(
    settings: EngineSettings, draft_folder: Path | None = None, adapted: Sequence[str] = ()
) -> EngineArgs:
    """Translate the library's settings of an engine into those of vLLM.

    Args:
        draft_folder: Folder with the description of the draft model that is trained with the policy; see `drafting`.
        adapted: Names of the layers that adapters may have.
    """
    speculation = speculation_of(settings.engine_kwargs)
    values: dict[str, Any] = {
        "model": str(model_folder(settings.model_name)) if pinned(settings.model_name) else settings.model_name,
        "tokenizer": described_source(settings.tokenizer_name),
        "trust_remote_code": may_run(settings.model_name) or may_run(settings.tokenizer_name),
        "dtype": settings.precision,
        "max_model_len": settings.max_model_len,
        "enforce_eager": settings.enforce_eager,
        "enable_sleep_mode": settings.can_sleep,
        # vLLM loads model and draft model in the same way.
        "load_format": "auto" if settings.load_weights or _draft_has_files(settings) else "dummy",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "seed": settings.seed,
        "hf_overrides": _hf_overrides(settings),
        "disable_log_stats": True,
    }
    model = load_model_config(settings.model_name, settings.hf_overrides)
    if settings.zero_mismatch and model.get_text_config().model_type in TYPES_OF_TRANSFORMERS:
        values["model_impl"] = "transformers"
    if reads_more_than_text(model):
        values |= _images(settings)
    if settings.num_workers > 1:
        values["distributed_executor_backend"] = RanksExecutor
        values["tensor_parallel_size"] = settings.tensor_parallel_size
        values["pipeline_parallel_size"] = settings.pipeline_parallel_size
        values["enable_expert_parallel"] = settings.expert_parallel_size > 1
    if settings.pipeline_parallel_size > 1 or settings.num_replicas > 1:
        # The answers of each stage are read in the order of the batches, and all replicas take a step together.
        values["async_scheduling"] = False
    if settings.reports_experts:
        values |= _reports(settings)
    if settings.device == "cpu":
        # # If a prompt were split over two steps, vLLM would reset the request's random generator to an earlier state.
        # CPU generators do not support this.
        values["enable_chunked_prefill"] = False
        # # With space for the proposals of all requests, the proposals of a request do not depend on other requests.
        proposals = CPU_SEQUENCES * (speculation.num_tokens + 1) if speculation else 0
        values["max_num_batched_tokens"] = max(_CPU_BATCHED_TOKENS, settings.max_model_len, proposals)
        values["max_num_seqs"] = CPU_SEQUENCES
        if settings.num_workers == 1:
            values["distributed_executor_backend"] = UniProcExecutor
    values |= _graphs(settings) | adapter_arguments(settings, adapted)
    if settings.kv_cache_bytes is not None:
        values["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    else:
        values["gpu_memory_utilization"] = settings.gpu_memory_utilization
    own = {key: value for key, value in settings.engine_kwargs.items() if key != "hf_overrides"}
    if draft_folder is not None and speculation is not None:
        own["speculative_config"] = {**speculation.values, "model": str(draft_folder)}
    if settings.trains_mtp:
        own["additional_config"] = {**(own.get("additional_config") or {}), **TRAINED_LAYERS}
    return EngineArgs(**(values | own))


def _images(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments for a model that reads images.

    Rows arrive with normalised pixels (`images`), so vLLM must not normalise them again, and its processor and the
    cache for its results are not used.
    """
    if not settings.media_tokens:
        return {"language_model_only": True}  # no weights are sent to towers for images
    return {
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
        "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
    }


def _draft_has_files(settings: EngineSettings) -> bool:
    """Return whether a draft model reads its weights from files. One that is trained with the policy does not."""
    speculation = speculation_of(settings.engine_kwargs)
    is_trained = settings.draft is not None or settings.trains_mtp
    return speculation is not None and speculation.loads_weights and not is_trained


def _reports(settings: EngineSettings) -> dict[str, bool]:
    """Return the arguments with which the experts of tokens can be reported.

    vLLM returns them only on GPUs. On CPUs, `experts` reads them between steps, while requests are still in the cache.
    """
    return {"async_scheduling": False} if settings.device == "cpu" else {"enable_return_routed_experts": True}


def _graphs(settings: EngineSettings) -> dict[str, int]:
    """Return the argument with which vLLM captures CUDA graphs for all requests of an engine's step.

    vLLM's own limit is 512 except on Blackwell GPUs, and larger steps would launch every kernel separately.
    """
    wanted = min(settings.samples, _MAX_GRAPH_REQUESTS)
    eager = settings.device == "cpu" or settings.enforce_eager
    if eager or wanted <= _GRAPH_REQUESTS or "compilation_config" in settings.engine_kwargs:
        return {}
    return {"max_cudagraph_capture_size": wanted}


def _hf_overrides(settings: EngineSettings) -> Any:
    """Merge changes to the model's configuration: the library's, then the policy's, then changes in `vllm_kwargs`."""
    own = settings.engine_kwargs.get("hf_overrides") or {}
    if not isinstance(own, Mapping):  # it may be a function
        return own
    model = load_model_config(settings.model_name, settings.hf_overrides)
    ours = _routing(model) | _convolution(model) | _head(settings, model, own)
    values = ours | settings.hf_overrides | _float8(settings, model) | dict(own)
    speculation = speculation_of(settings.engine_kwargs)
    if speculation is not None and speculation.method == "mtp":
        # vLLM reads the configuration a second time for these layers, and then applies only overrides that are
        # functions.
        return partial(_updated, values)
    return values


def _updated(values: Mapping[str, Any], config: PretrainedConfig) -> PretrainedConfig:
    config.update(dict(values))
    return config


def _float8(settings: EngineSettings, model: PretrainedConfig) -> dict[str, Any]:
    """Return the description of float8 weights, or nothing if vLLM gets unquantized weights."""
    quantization = settings.quantization
    if quantization is None or quantization.simulated:
        return {}
    return {"quantization_config": quantization_config(quantization, unquantized_layers(model, quantization))}


def _head(settings: EngineSettings, model: PretrainedConfig, own: Mapping[str, Any]) -> dict[str, str]:
    """Request float32 logits on GPUs, as in the trainer. vLLM would otherwise round them to the weights' dtype.

    Bfloat16 logits between 16 and 32 have steps of 0.125. The product uses the same kernel with another output dtype.
    Nothing is requested on CPUs, because vLLM would copy the head to float32 in every step. Quantized heads do not
    support float32.
    """
    of_model = own.get("quantization_config", getattr(model, "quantization_config", None))
    of_model = None if settings.quantization is not None else of_model  # `_float8` replaces this and excludes the head
    quantized = settings.engine_kwargs.get("quantization") or of_model
    if settings.device == "cpu" or settings.precision == "float32" or quantized:
        return {}
    return {"head_dtype": "float32"}


def _routing(model: PretrainedConfig) -> dict[str, str]:
    """Configure vLLM's router of DeepSeek-V3 with sigmoids and a bias, as transformers always does.

    The published `config.json` has these settings, but a `config.json` written by transformers lacks them. Without
    them, vLLM would refuse the bias and use the softmax.
    """
    if model.model_type != "deepseek_v3":
        return {}
    return {key: value for key, value in _DEEPSEEK_V3_ROUTING.items() if getattr(model, key, None) is None}


def _convolution(model: PretrainedConfig) -> dict[str, int]:
    """Give vLLM the channels of LFM2's short convolutions, which a `config.json` written by transformers lacks."""
    if model.model_type != "lfm2":
        return {}
    return {key: model.hidden_size for key in ("conv_dim", "block_dim") if getattr(model, key, None) is None}


def sampling_params(
    sampling: SamplingParams, seed: int, room: int, eos: int | None = None, never: Sequence[str] = ()
) -> VllmSamplingParams:
    """Translate sampling parameters into vLLM's.

    Args:
        room: Number of tokens left in the context.
        eos: The tokenizer's end-of-text token. A complete response with a grammar may end with it.
        never: Further texts that the response must not contain.

    Raises:
        ValueError: The grammar is not valid.
    """
    grammar = sampling.grammar
    ends = [] if grammar is None or eos is None or eos in sampling.stop_token_ids else [eos]
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        max_tokens=min(sampling.max_new_tokens, room),
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        stop=list(sampling.stop_strings) or None,
        bad_words=[*sampling.bad_words, *never] or None,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stop_token_ids=[*sampling.stop_token_ids, *ends],
        structured_outputs=None if grammar is None else structured_outputs(grammar),
        ignore_eos=True,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared, and vLLM's deep copy is slow
    )
