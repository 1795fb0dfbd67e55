"""Load a Hugging Face model for training, and decide which of its weights stay float32.

Invariant: loaded weights are in float32, and no weight is quantised, offloaded or on another device.

Some weights stay float32 when the model computes in bfloat16 or float16. These are the weights that transformers keeps
(`_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules` in float16), the biases by which routers choose experts,
and the parameters of recurrent states. For example, rounding a bias of size 6 to bfloat16 would send a quarter of the
tokens to other experts. Engines hold all of these weights in float32, or round them when they load them. Invariant:
training, weight syncs and engines of the library use the functions of this module, so they keep the same weights.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from nemo_rl.data.images.families import FAMILIES
from nemo_rl.distributed.parallel_logprobs import initial_head
from nemo_rl.files.hub_download import described_source, one_download
from nemo_rl.files.regular_file import require_regular_files
from nemo_rl.files.trusted_code import ADVICE, is_refused, may_run
from nemo_rl.models.huggingface.comparison import is_classifier
from nemo_rl.models.huggingface.tensor_files import cached_folder, model_folder
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)

PRECISIONS: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_HEAD_WEIGHT = "score.weight"
"""Name of the scalar head's weight in the sequence classifiers of transformers."""

WITHOUT_PACKING = (
    "Set policy.sequence_packing.enabled=false for this model "
    "(policy.dynamic_batching.enabled=true saves most of the padding instead)."
)
WITHOUT_DIVIDED_ROWS = (
    "Leave policy.dtensor_cfg.context_parallel_size=1 and policy.dtensor_cfg.sequence_parallel=false, too."
)
_CHOOSE_KEYS = (
    *("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"),
)
"""Values of `layer_types` whose layers choose the keys of a token by a mask of the whole row."""


def torch_dtype(precision: str) -> torch.dtype:
    """Return the torch dtype of a `policy.precision` value.

    Raises:
        ConfigError: the name is not one of bfloat16, float16, float32.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"policy.precision={precision!r}: use one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[precision]


def load_causal_lm(
    model_name: str,
    *,
    config_overrides: dict[str, Any] | None = None,
    attn_implementation: str | None = None,
) -> "PreTrainedModel":
    """Load configuration and weights onto the CPU, as float32 master weights.

    Args:
        model_name: Hugging Face id or local folder.
        config_overrides: fields of the model's configuration to replace.
        attn_implementation: name of the attention function. If None, the architecture chooses, but models with
            soft-capped attention scores get "eager", the only function that applies the cap.

    Returns:
        The model in eval mode.

    Raises:
        DownloadError: the model is not a folder and cannot be downloaded.
        ConfigError: the model has no configuration, does not accept an attention function, or an override names no
            field of its configuration.
    """
    files = files_of(model_name)  # first, so that one rank per machine contacts the hub
    config = load_model_config(model_name, config_overrides)
    require_text_model(config, model_name)
    kind = auto_class(config)
    attention = attention_choice(config, attn_implementation, kind)
    trusted = may_run(files)
    model = kind.from_pretrained(files, config=config, dtype=torch.float32, trust_remote_code=trusted, **attention)
    return model.eval()


def auto_class(config: PretrainedConfig) -> "type[_BaseAutoModelClass]":
    """Return the class of transformers that loads a model with an output head, with its parts for images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def load_scoring_model(
    model_name: str,
    *,
    config_overrides: dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    seed: int = 0,
    attributes: Sequence[str] = (),
) -> "PreTrainedModel":
    """Load a language model, or a reward model, as a sequence classifier in float32.

    If the files contain no head for scores, the head gets the values of `initial_head`, which are equal on every rank.

    Args:
        model_name: Hugging Face id or local folder.
        config_overrides: fields of the model's configuration to replace.
        attn_implementation: as in `load_causal_lm`.
        seed: run seed, for a new head.
        attributes: names of the head's scores. If empty, the head has one score without a name.

    Raises:
        DownloadError: the model is not a folder and cannot be downloaded.
        ConfigError: the model has no configuration or no sequence classifier, does not accept an attention function, or
            an override names no field.
    """
    from transformers import AutoModelForSequenceClassification

    files = files_of(model_name)
    config = load_model_config(model_name, config_overrides)
    describe_scores(config, attributes)
    attention = attention_choice(config, attn_implementation, AutoModelForSequenceClassification)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                files,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=may_run(files),
                **attention,
            )
    except ValueError as error:
        raise ConfigError(f"policy.model_name={model_name!r} cannot be loaded with a scalar head: {error}") from error
    if _HEAD_WEIGHT in loaded["missing_keys"]:
        weight = model.get_parameter(_HEAD_WEIGHT)
        with torch.no_grad():
            weight.copy_(initial_head(weight.shape[-1], seed, weight.shape[0]))
    return model.eval()


def describe_scores(config: PretrainedConfig, attributes: Sequence[str] = (), section: str = "policy") -> None:
    """Write the scores of a sequence classifier into its configuration, in place, as its labels.

    Args:
        attributes: names of the scores. If empty, the classifier has one score without a name.
        section: section of the model, for messages.

    Raises:
        ConfigError: the configuration is that of a classifier with another number of scores.
    """
    num_scores = len(attributes) or 1
    if is_classifier(config) and config.num_labels != num_scores:
        raise ConfigError(
            f"{section}.model_name={config.name_or_path!r} is a sequence classifier with {config.num_labels} scores "
            f"({', '.join(names_of_scores(config))}), but a model with {num_scores} is wanted. Name another model, "
            "or those scores in policy.reward_model_cfg.attributes; a critic (value) has one score."
        )
    if not attributes:
        config.num_labels = 1
        return
    config.id2label = dict(enumerate(attributes))
    config.label2id = {name: index for index, name in config.id2label.items()}


def names_of_scores(config: PretrainedConfig) -> list[str]:
    """Return the names of a sequence classifier's scores in the order of its outputs, `LABEL_0`, ... without names."""
    labels: Any = config.id2label
    return [str(labels[index]) for index in range(len(labels))]


def attention_choice(
    config: PretrainedConfig, attn_implementation: str | None, kind: "type[_BaseAutoModelClass]"
) -> dict[str, Any]:
    """Return the keyword argument `attn_implementation` for loading a model, or no argument.

    Raises:
        ConfigError: the architecture does not accept an attention function.
    """
    if attn_implementation is None:
        return {"attn_implementation": "eager"} if _softcaps_attention(config) else {}
    classes: Any = kind._model_mapping
    model_class = classes.get(type(config), None)
    if model_class is not None and not model_class._can_set_attn_implementation():
        raise ConfigError(
            f"{model_class.__name__} computes its attention in its own code, which supports neither packed rows nor "
            f"rows that ranks divide. {WITHOUT_PACKING} {WITHOUT_DIVIDED_ROWS}"
        )
    sparse = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())} & {*_CHOOSE_KEYS})
    if sparse:
        raise ConfigError(
            f"{config.model_type} has layers that choose few keys for each token by a mask of the whole row "
            f"({', '.join(sparse)}). Packed rows, and rows that ranks divide, have no such mask. {WITHOUT_PACKING} "
            f"{WITHOUT_DIVIDED_ROWS}"
        )
    return {"attn_implementation": attention_of_parts(config, attn_implementation)}


def attention_of_parts(config: PretrainedConfig, text_attention: str) -> str | dict[str, str]:
    """Return the `attn_implementation` of a model with this attention in its text model.

    Modules that read images are not causal, so they use the attention of PyTorch.
    """
    if config.model_type not in FAMILIES:
        return text_attention
    return {"": text_attention} | dict.fromkeys(config.sub_configs, "sdpa") | {"text_config": text_attention}


def load_model_config(
    model_name: str, overrides: dict[str, Any] | None = None, section: str = "policy"
) -> PretrainedConfig:
    """Load a model's configuration, and apply overrides.

    Args:
        model_name: Hugging Face id or local folder.
        overrides: fields to replace.
        section: section of the configuration that names the model, for messages.

    Raises:
        ConfigError: the model cannot be found or an override names no field of its configuration.
    """
    try:
        require_regular_files(model_name)
        # # The configuration is read from the same commit as the weights.
        config = read_config(cached_folder(model_name) or described_source(model_name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.model_name={model_name!r} {_unreadable(model_name, error)}") from error
    for key, value in (overrides or {}).items():
        if not hasattr(config, key):
            raise ConfigError(
                f"{section}.hf_config_overrides.{key}: {type(config).__name__} has no field of that name. "
                f"Its fields: {', '.join(sorted(config.to_dict()))}."
            )
        setattr(config, key, value)
    _choose_experts(config)
    return config


_OF_EXPERTS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "moe_latent_size")
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ALIGNED = 8
"""Sizes whose multiples have rows of 16 bytes in every dtype, as PyTorch's grouped products need."""


def _choose_experts(config: PretrainedConfig) -> None:
    """Compute experts one after the other if PyTorch's grouped products do not support their sizes."""
    text = config.get_text_config()
    if not any(getattr(text, name, None) for name in _NUMBERS_OF_EXPERTS):
        return
    sizes = {name: size for name in _OF_EXPERTS if isinstance(size := getattr(text, name, None), int)}
    if any(size % _ALIGNED for size in sizes.values()):
        logger.info("Experts run one after the other: their sizes are no multiples of %d (%s).", _ALIGNED, sizes)
        config._experts_implementation = "eager"


OWN_CODE = "transformers_modules."
"""Start of the module names of classes that transformers has loaded from the folder of a model."""

_SAME_LAYERS = {"kimi_k2": "deepseek_v3"}
"""Values of `model_type` without a class in transformers, with the type that has the same layers and fields."""


_NO_CONFIG = "is neither a model folder with a config.json nor a model id that can be downloaded from here"
_UNKNOWN_TYPE = re.compile(r"model type `(?P<kind>[^`]*)` but Transformers does not recognize")


def _unreadable(model_name: str, error: Exception) -> str:
    """Describe why the configuration of a model cannot be read, and what to do."""
    unknown = _UNKNOWN_TYPE.search(str(error))
    if unknown is not None:
        return (
            f"has the model_type {unknown['kind']!r}, which transformers {transformers.__version__} does not know, and "
            "its config.json names no classes of its own (auto_map). Choose a model of a known type, such as those of "
            "docs/reference/model-support.md."
        )
    if is_refused(error):
        return f"is of a type whose classes are in its own files (auto_map in its config.json). {ADVICE}"
    has_config = (Path(model_name).expanduser() / "config.json").is_file()
    return f"has a config.json that cannot be read: {error}" if has_config else f"{_NO_CONFIG}: {error}"


def read_config(files: str | Path) -> PretrainedConfig:
    """Read the configuration of a model. If its folder has code that may run (`may_run`), load its classes.

    Args:
        files: local folder, or hub id.

    Raises:
        OSError, ValueError: there is no configuration, or its type is known neither to transformers nor by its folder.
        ConfigError: the classes of the folder cannot be used.
    """
    if may_run(files):
        with one_download(Path(files).name):  # transformers copies the code into a folder that processes share
            return _with_own_classes(str(files))
    written, _ = PretrainedConfig.get_config_dict(files)
    known = _SAME_LAYERS.get(written.get("model_type", ""))
    if known is None:
        # # Without trust_remote_code=False, transformers would ask on a terminal whether to run code of the folder.
        return AutoConfig.from_pretrained(files, trust_remote_code=False)
    fields = {name: value for name, value in written.items() if name not in ("model_type", "auto_map")}
    return AutoConfig.for_model(known, **fields)


def _with_own_classes(folder: str) -> PretrainedConfig:
    """Read a configuration whose classes are in its folder, and register them, so that `from_config` finds them."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    for name, reference in (getattr(config, "auto_map", None) or {}).items():
        kind: Any = getattr(transformers, name, None)
        if not name.startswith("AutoModel") or kind is None:
            continue
        if type(config).__module__.startswith("transformers."):
            raise ConfigError(
                f"{folder}: auto_map has {name}, but the configuration is the {type(config).__name__} of transformers. "
                "Its code would replace that of every model of this type. Add a configuration class with a model_type "
                "of its own, or remove auto_map."
            )
        try:
            own = get_class_from_dynamic_module(reference, folder)
            kind.register(type(config), own, exist_ok=True)
        except (ImportError, OSError, AttributeError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{folder}: the class {reference} of {name} cannot be loaded: {error}") from error
    return config


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Return whether a configuration contains parts for images, sound or video besides a text model."""
    return config.get_text_config() is not config and len(config.sub_configs) > 1


def require_text_model(config: PretrainedConfig, model_name: str, section: str = "policy") -> None:
    """Refuse a checkpoint if transformers has no language model for its files, such as one for images or sound.

    Raises:
        ConfigError: there is no language model.
    """
    if config.model_type in FAMILIES:
        return
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS

    if not reads_more_than_text(config):
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ConfigError(
                f"{section}.model_name={model_name!r} is of the type {config.model_type}, for which transformers "
                f"{transformers.__version__} has no language model (AutoModelForCausalLM). Choose a model that reads "
                "text from left to right."
            )
        return
    if config.model_type not in LANGUAGE_MODELS:
        raise ConfigError(
            f"{section}.model_name={model_name!r} ({config.model_type}) reads more than text, and transformers has no "
            "language model for its files. Choose a text model, or one of these that can be trained on text: Gemma 3, "
            f"Llama 4, Qwen3.5, {', '.join(FAMILIES)}."
        )


def files_of(model_name: str) -> str:
    """Return the folder of a model's files, downloaded if necessary, or the hub id if it has no safetensors files.

    Raises:
        DownloadError: the model is not a folder and cannot be downloaded.
    """
    folder = model_folder(model_name)
    has_weights = folder == Path(model_name).expanduser() or cached_folder(model_name) == folder
    return str(folder) if has_weights else model_name


def _softcaps_attention(config: PretrainedConfig) -> bool:
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


_ROUNDED = (torch.bfloat16, torch.float16)
_BY_NAME = r"(?:^|\.)(?:e_score_correction_bias|expert_bias|A_log|dt_bias|D)$"


def stays_float32(hf: "PreTrainedModel", dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return a function of a weight's name that tells whether it stays float32 in a model of `dtype`.

    Args:
        dtype: number format of the other weights. The function always returns False for None or float32.
    """
    if dtype not in _ROUNDED:
        return lambda _: False
    return _search_for(hf._get_dtype_plan(dtype))


def stays_float32_in_files(architecture: str | None, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return a function like that of `stays_float32`, for the names of tensors in a model folder.

    Args:
        architecture: name of the model's class in transformers; if None, only names common to all models are used.
        dtype: number format of the other tensors.
    """
    if dtype not in _ROUNDED:
        return lambda _: False
    model_class = getattr(transformers, architecture or "", None)
    names = list(getattr(model_class, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names += getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return _search_for(names)


def _search_for(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that searches names for patterns as transformers does (`build_glob_alternation`)."""
    kept = re.compile("|".join([_BY_NAME, *(name.replace("*", ".*") for name in patterns)]))
    return lambda name: kept.search(name) is not None


def float32_parameters(hf: "PreTrainedModel", dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters that stay float32 in a model that computes in `dtype`, by name."""
    stays = stays_float32(hf, dtype)
    return {name: each for name, each in hf.named_parameters() if each.is_floating_point() and stays(name)}


@torch.no_grad()
def hold_in_float32(hf: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Convert to float32, in place, the parameters that stay float32 in a model with other weights in `dtype`."""
    for parameter in float32_parameters(hf, dtype).values():
        parameter.data = parameter.data.float()
