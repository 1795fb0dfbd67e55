"""Build the small model and the small mesh of a proof, with every kind of layer on as few ranks as possible.

Invariant: every size that ranks divide stays a multiple of their number. Odd numbers, such as seven query heads for
each key head or three ranks, stay odd. Unknown sizes keep their value.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.attention import attention_to_load
from nemo_rl.models.huggingface.layers import WITH_LAYERS, decoder_layers
from nemo_rl.models.huggingface.load import WITHOUT_DIVIDED_ROWS, WITHOUT_PACKING, attention_choice
from nemo_rl.models.huggingface.probe_model import CANNOT_BE_MADE, EXPERTS, filled, fit_weights, of_few_layers, smaller
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_WINDOW = 5
"""Number of tokens of a sliding window or attention chunk. Rows of a proof are longer."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_d_ssm")
_WIDTH = 256
_MOST_PARAMETERS = 150_000_000
"""Largest number of parameters of a small model. Larger models need too much memory and time."""
_RANDOM = re.compile(r"dropout|pdrop|drop_rate|layerdrop|jitter")
_TOKENS = 8
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class SmallMesh:
    """The smallest mesh with the same kinds of division as a given mesh."""

    layout: ParallelLayout
    """Size of each axis: 2 for pipeline stages, and for others the smallest prime factor of the size in the given mesh.
    Data-parallel ranks are added only if expert parallelism needs more ranks than the other axes have."""
    virtual: int
    """Chunks of layers of each pipeline stage."""

    @classmethod
    def of(cls, policy: PolicyConfig, layout: ParallelLayout) -> "SmallMesh":
        """Return the small mesh for the layout of a run."""
        pp, cp, tp, ep = (_smallest_prime(size) for size in (layout.pp, layout.cp, layout.tp, layout.ep))
        shards = ep // math.gcd(ep, cp * tp)
        virtual = min(2, policy.dtensor_cfg.virtual_pipeline_size) if pp > 1 else 1
        return cls(ParallelLayout(pp=2 if pp > 1 else 1, dp_shard=shards, cp=cp, tp=tp, ep=ep), virtual)

    @property
    def layers(self) -> int:
        """Return the smallest number of layers that this mesh needs."""
        return max(2, self.layout.pp * self.virtual)


def _smallest_prime(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def small_policy(policy: PolicyConfig, mesh: SmallMesh) -> PolicyConfig:
    """Return the policy section of the small model, without rounding, optimizer, dropout and offload."""
    asked, sizes = policy.dtensor_cfg, mesh.layout
    lora = asked.lora_cfg
    adapters = lora.model_copy(
        update={
            "dropout": 0.0,
            "target_modules": [_LAYER_NUMBER.sub("*", name) for name in lora.target_modules],
            "exclude_modules": [_LAYER_NUMBER.sub("*", name) for name in lora.exclude_modules],
        }
    )
    section = asked.model_copy(
        update={
            "tensor_parallel_size": sizes.tp,
            "context_parallel_size": sizes.cp,
            "pipeline_parallel_size": sizes.pp,
            "expert_parallel_size": sizes.ep,
            "virtual_pipeline_size": mesh.virtual,
            "dp_replicate_size": 1,
            "cpu_offload": False,
            "lora_cfg": adapters,
        }
    )
    changed = {"dtensor_cfg": section, "precision": "float32", "make_sequence_length_divisible_by": 1}
    return policy.model_copy(update=changed | {"optimizer": None, "scheduler": None, "generation": None})


def small_model(config: PretrainedConfig, policy: PolicyConfig, mesh: SmallMesh) -> PreTrainedModel:
    """Build a small model of the architecture with random weights, in float32 and eval mode, with every kind of layer.

    Reduced forms of the configuration are tried, smallest first, until the architecture's code runs.

    Args:
        mesh: the small mesh that will divide the model.

    Raises:
        ConfigError: the architecture's code runs with none of the forms.
    """
    auto: Any = AutoModelForSequenceClassification if policy.reward_model_cfg.enabled else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise ConfigError(
            f"{auto.__name__} of transformers {transformers.__version__} has no model of the type {config.model_type}. "
            f"{WITH_LAYERS}"
        )
    kind: type[PreTrainedModel] = _get_model_class(config, auto._model_mapping)
    text = config.sub_configs.get("text_config")
    if text is not None and kind.config_class is text:  # as transformers loads such files
        config = config.get_text_config()
    asked = attention_to_load(policy)
    attention = attention_choice(config, asked, auto)
    model = _first_that_runs(kind, config, policy, mesh, attention)
    if isinstance(model, PreTrainedModel):
        return model
    if asked is not None:
        own = _first_that_runs(kind, config, policy, mesh, {"attn_implementation": "eager"})
        if isinstance(own, PreTrainedModel):
            raise ConfigError(
                f"{kind.__name__} only runs with attention that reads whole padded rows; with the one for packed and "
                f"divided rows it raises {model}. {WITHOUT_PACKING} {WITHOUT_DIVIDED_ROWS}"
            )
    raise ConfigError(
        f"no small form of {kind.__name__} runs, so nothing can be proven for this model ({model}). Check that its "
        "config.json is complete, and that transformers can make and run it."
    )


def _first_that_runs(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    policy: PolicyConfig,
    mesh: SmallMesh,
    attention: Mapping[str, Any],
) -> PreTrainedModel | str:
    """Return a model of the smallest form that runs, or the error of the last form if none does."""
    reason = ""
    for form in _forms(config, mesh, ulysses=policy.dtensor_cfg.context_parallel_method == "ulysses"):
        try:
            if policy.reward_model_cfg.enabled:
                form.num_labels = 1
            _fix_what_is_random(form)
            for name, value in attention.items():
                setattr(form, f"_{name}", value)
            model = of_few_layers(kind, form, mesh.layers)
            _require_small(model)
            return _running(filled(model))
        except ConfigError:
            raise
        except (*CANNOT_BE_MADE, KeyError, IndexError, NotImplementedError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.debug("A small form of %s does not run: %s", kind.__name__, reason)
    return reason


def _forms(config: PretrainedConfig, mesh: SmallMesh, *, ulysses: bool) -> Iterator[PretrainedConfig]:
    """Yield reduced forms of a configuration, smallest first. The last form is the configuration itself."""
    for form in (_narrow, _with_few_heads, _without_few_heads):
        try:
            yield form(deepcopy(config), mesh, ulysses)
        except CANNOT_BE_MADE as error:
            logger.debug("%s has no such form: %r", config.model_type, error)
    yield deepcopy(config)


def _without_few_heads(config: PretrainedConfig, mesh: SmallMesh, ulysses: bool) -> PretrainedConfig:
    """Reduce vocabulary, feed-forward layers, windows and the number of experts, but not the attention heads."""
    before: Any = deepcopy(config.get_text_config())
    text: Any = smaller(config).get_text_config()
    ranks = math.lcm(mesh.layout.tp, mesh.layout.ep)
    text.vocab_size -= text.vocab_size % mesh.layout.tp
    for name in EXPERTS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(math.lcm(getattr(text, name), ranks), getattr(before, name)))
    for name, value in vars(text).items():
        if name.endswith("intermediate_size") and isinstance(value, int) and value < getattr(before, name):
            setattr(text, name, value // 2 * mesh.layout.tp)
    for name in _WINDOWS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > _WINDOW:
            setattr(text, name, _WINDOW)
    return config


def _with_few_heads(config: PretrainedConfig, mesh: SmallMesh, ulysses: bool) -> PretrainedConfig:
    """Also reduce the key heads to one or two per rank that divides them, and the hidden size in proportion."""
    text: Any = _without_few_heads(config, mesh, ulysses).get_text_config()
    before = text.num_attention_heads
    heads, keys = _few_heads(text, mesh, ulysses)
    if heads >= before or text.hidden_size * heads % before:
        raise ValueError(f"{before} heads of {text.hidden_size} features")
    _set_heads(text, heads, keys)
    _set_width(text, text.hidden_size * heads // before)
    return config


def _narrow(config: PretrainedConfig, mesh: SmallMesh, ulysses: bool) -> PretrainedConfig:
    """Also reduce the number of heads, keep the size of a head, and choose the hidden size independently."""
    if not isinstance(getattr(config.get_text_config(), "head_dim", None), int):
        raise ValueError("the size of its heads follows from its width")
    text: Any = _without_few_heads(config, mesh, ulysses).get_text_config()
    if text.hidden_size <= _WIDTH:
        raise ValueError("it is already narrow")
    size = text.head_dim
    _set_heads(text, *_few_heads(text, mesh, ulysses))
    _set_width(text, _WIDTH)
    text.head_dim = size
    return config


def _few_heads(text: Any, mesh: SmallMesh, ulysses: bool) -> tuple[int, int]:
    """Return the reduced numbers of query heads and of key heads."""
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % keys:
        raise ValueError(f"{heads} heads of queries and {keys} of keys")
    ranks = mesh.layout.tp * (mesh.layout.cp if ulysses else 1)
    of_a_key = heads // keys
    few = ranks * min(keys // ranks, 2) if keys % ranks == 0 else keys
    return few * (of_a_key if of_a_key <= 2 else 3 if of_a_key % 2 else 2), few


def _set_heads(text: Any, heads: int, keys: int) -> None:
    text.num_attention_heads = heads
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = keys


def _set_width(text: Any, width: int) -> None:
    """Set the hidden size, with weights and the number of heads of state-space layers in proportion."""
    for name in _MAMBA_HEADS:
        count = getattr(text, name, None)
        if isinstance(count, int) and count * width % text.hidden_size == 0:
            setattr(text, name, count * width // text.hidden_size)
    text.hidden_size = width
    fit_weights(text)


def _require_small(model: PreTrainedModel) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"with {size / 1e9:.1f} billion parameters it is too large to try out")


def _fix_what_is_random(config: PretrainedConfig) -> None:
    """Set dropout and other random effects of training to 0, because ranks draw different random numbers."""
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        values: Any = part
        for name, value in list(vars(part).items()):
            if _RANDOM.search(name) and isinstance(value, float):
                setattr(values, name, 0.0)


@torch.no_grad()
def _running(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model unchanged, or raise an error if it does not give finite outputs for a few tokens."""
    decoder_layers(model)
    tokens = (torch.arange(_TOKENS) * 5 + 1)[None] % model.config.get_text_config().vocab_size
    logits = model(input_ids=tokens, use_cache=False).logits
    if not bool(logits.isfinite().all()):
        raise ValueError("it gives numbers that are not finite")
    return model
