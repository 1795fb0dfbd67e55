"""Find the plan by which tensor-parallel ranks divide the parameters of an architecture.

A plan maps names of modules or parameters, usually with `*` for layer numbers, to a `Style`. It comes from the user
(`policy.dtensor_cfg.custom_parallel_plan`), or from the model's own `tp_plan` and the additions in `OWN`. A style in
`tp_plan` only defines which dimension to divide. `tensor_parallel` decides where to communicate. Experts are not in a
plan, because `expert_parallel` finds them. Most plans of transformers leave out shared experts, which `shared_experts`
finds by their shape.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface.layers import body
from nemo_rl.models.huggingface.mixers import HeadPart, Mixer, find_mixers
from nemo_rl.models.huggingface.probe_model import CANNOT_BE_MADE
from nemo_rl.models.huggingface.sizes import head_size
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

type How = Literal["column", "row", "sum", "norm", "output", "vocabulary"]
"""`column` divides the outputs of a linear layer (or a parameter with one value per head), `row` divides its inputs,
and `vocabulary` divides the rows of an embedding or of the output head. `sum` is `row` for a layer inside a block whose
outputs all ranks need there, and `norm` is `column` for a norm over channels that the ranks divide. `output` is a norm
of a block's output: it is not divided, and gets the sum of all ranks instead of the block's end."""


@dataclass(frozen=True)
class Style:
    """Division of a module or a parameter."""

    how: How
    """The kind of division."""
    parts: tuple[int, ...] = ()
    """Numbers of outputs of the layers that a fused `column` layer combines. Empty for a single layer."""
    dim: int | None = None
    """Dimension to divide, for a parameter that is not a linear layer's weight (experts `[E, in, out]`)."""
    heads: tuple[HeadPart, ...] = ()
    """Parts like `parts`, of which ranks take whole heads (`huggingface.mixers`)."""
    groups: int = 1
    """Number of groups of channels that a `norm` normalizes separately."""

    @property
    def fused(self) -> tuple[HeadPart, ...]:
        """Return the parts from which a rank selects rows, or an empty tuple if its rows are next to each other."""
        parts = self.heads or tuple(HeadPart(size, size) for size in self.parts)
        return () if len(parts) == 1 and not parts[0].shared else parts


type Plan = Mapping[str, Style]

COLUMN, ROW, VOCABULARY = Style("column"), Style("row"), Style("vocabulary")
_FROM_TRANSFORMERS: Mapping[str, Style] = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": ROW,
    "embedding_rowwise": VOCABULARY,
}
"""Styles of transformers that divide a parameter, except those for experts."""
_KNOWN_WHOLE = (
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "moe_identity_expert",
    "packed_colwise",
    "packed_rowwise",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
    "sequence_parallel",
    "all_reduce",
)
_DOWN = ("down_proj", "w2", "fc2", "c_proj", "output_linear", "dense_4h_to_h", "wo")
"""Names that architectures give to the last linear layer of a feed-forward layer."""
_GATHERED = ("colwise_gather_output", "rowwise_split_input")
"""Styles of transformers for layers that give and take whole tensors, so that ranks need not divide them."""
_MLA = {"q_proj": COLUMN, "q_b_proj": COLUMN, "kv_b_proj": COLUMN, "o_proj": ROW}
_ATTENTION = {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW}
_NORM = Style("norm")
_OUTPUT = Style("output")
_GATED_MLP = {"gate_proj": COLUMN, "up_proj": COLUMN, "down_proj": ROW}


def _deepseek(config: Any) -> dict[str, Style]:
    return {f"layers.*.self_attn.{name}": style for name, style in _MLA.items()}


def _axk1(config: Any) -> dict[str, Style]:
    return _deepseek(config) | {"layers.*.mlp.post_mlp_layernorm": _OUTPUT}


def _gpt_oss(config: Any) -> dict[str, Style]:
    return {f"layers.*.self_attn.{name}": style for name, style in (_ATTENTION | {"sinks": COLUMN}).items()}


def _phi3(config: Any) -> dict[str, Style]:
    head_dim = head_size(config)
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "layers.*.self_attn.qkv_proj": Style("column", (queries, keys, keys)),
        "layers.*.self_attn.o_proj": ROW,
        "layers.*.mlp.gate_up_proj": Style("column", (config.intermediate_size, config.intermediate_size)),
        "layers.*.mlp.down_proj": ROW,
    }


def _llama4(config: Any) -> dict[str, Style]:
    """Divide each expert like a feed-forward layer. The parameters of all experts are fused as `[E, in, out]`."""
    experts, width = "layers.*.feed_forward.experts", config.intermediate_size
    return {
        f"{experts}.gate_up_proj": Style("column", (width, width), dim=2),
        f"{experts}.down_proj": Style("row", dim=1),
    }


def _normed_attention(config: Any) -> dict[str, Style]:
    """Divide attention whose queries and keys are normalized over all heads (OLMo)."""
    styles = _ATTENTION | {"q_norm": _NORM, "k_norm": _NORM}
    return {f"layers.*.self_attn.{name}": style for name, style in styles.items()}


def _attention_and(block: str, styles: Mapping[str, Style], **attention: Style) -> Callable[[Any], dict[str, Style]]:
    """Return a function for a model with usual attention and one other kind of block."""
    found = {f"layers.*.self_attn.{name}": style for name, style in {**_ATTENTION, **attention}.items()}
    found |= {f"layers.*.{block}.{name}": style for name, style in styles.items()}
    return lambda config: found


def _granite_hybrid(config: Any) -> dict[str, Style]:
    width = config.shared_intermediate_size
    mlp = {"input_linear": Style("column", (width, width)), "output_linear": ROW}
    return _attention_and("shared_mlp", mlp)(config)


def _glm(config: Any) -> dict[str, Style]:
    width = config.intermediate_size
    return _attention_and("mlp", {"gate_up_proj": Style("column", (width, width)), "down_proj": ROW})(config)


def _minimax_m3(config: Any) -> dict[str, Style]:
    """Divide the heads that choose blocks of keys like those of keys, because a head of keys has its own choice."""
    width, heads = config.dense_intermediate_size, config.index_n_heads
    choice = Style("column", heads=(HeadPart(heads * config.index_head_dim, heads),))
    mlp = {"gate_up_proj": Style("column", (width, width)), "down_proj": ROW}
    return _attention_and("mlp", mlp, **{"indexer.q_proj": choice})(config)


def _nemotron_h(config: Any) -> dict[str, Style]:
    """Divide each kind of layer. A layer has one block, whose name is that of all kinds."""
    styles = _ATTENTION | {"up_proj": COLUMN, "down_proj": ROW}
    return {f"layers.*.mixer.{name}": style for name, style in styles.items()}


OWN: Mapping[str, Callable[[Any], dict[str, Style]]] = {
    "axk1": _axk1,
    "bamba": _attention_and("feed_forward", _GATED_MLP),
    "deepseek_v3": _deepseek,
    "falcon_h1": _attention_and("feed_forward", _GATED_MLP),
    "flex_olmo": _normed_attention,
    "glm": _glm,
    "glm4": _glm,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _attention_and("feed_forward", _GATED_MLP),
    "kimi_linear": _deepseek,
    "lfm2": _attention_and("feed_forward", {"w1": COLUMN, "w3": COLUMN, "w2": ROW}, out_proj=ROW),
    "lfm2_moe": _attention_and("feed_forward", {"w1": COLUMN, "w3": COLUMN, "w2": ROW}, out_proj=ROW),
    "llama4_text": _llama4,
    "minimax_m2": _normed_attention,
    "minimax_m3_vl_text": _minimax_m3,
    "nemotron_h": _nemotron_h,
    "olmo2": _normed_attention,
    "olmo3": _normed_attention,
    "olmo_hybrid": _normed_attention,
    "olmoe": _normed_attention,
    "phi3": _phi3,
    "phi4_multimodal": _phi3,
    "qwen4_exp_text": _attention_and("mlp", {}),
}
"""Functions by `model_type` that return additions to the model's own plan. Names are relative to the decoder body."""

_WHOLE: Mapping[str, str] = {
    "gemma3n_text": "its AltUp computes with the weights of its layers itself, on four streams of hidden states",
}
"""Types whose layers cannot be divided by any plan -> reason."""


def plan_for(hf: PreTrainedModel, custom: str | None = None) -> dict[str, Style]:
    """Return the plan of a model, by the names of its parameters.

    Args:
        hf: the model; only its class and configuration are read.
        custom: dotted path of a plan of the layers, or of a function that takes the model's configuration and returns
            a plan. The values of the plan are `Style`s or names of transformers ("colwise", "rowwise").

    Raises:
        ConfigError: there is no plan, the plan has an unknown style, or the model's code cannot be divided.
    """
    whole = _WHOLE.get(hf.config.get_text_config().model_type)
    if whole is not None:
        raise ConfigError(
            f"{type(hf).__name__} cannot be divided over tensor-parallel ranks: {whole}. Set "
            "policy.dtensor_cfg.tensor_parallel_size=1."
        )
    if custom is not None:
        given = import_dotted(
            custom,
            ConfigError,
            f"policy.dtensor_cfg.custom_parallel_plan={custom!r}",
            "Give the dotted path of a mapping from module names to styles, or of a function that returns one.",
        )
        return _read(given(hf.config) if callable(given) else given, custom) | _vocabulary(hf)
    prefix = f"{next(name for name, module in hf.named_modules() if module is body(hf))}."
    own = OWN.get(hf.config.get_text_config().model_type)
    added = {prefix + name: style for name, style in own(hf.config.get_text_config()).items()} if own else {}
    mixers = find_mixers(hf)
    added |= _recurrent(mixers)
    # # A pipeline stage may lack a kind of layer, and recurrent layers have styles of their own.
    names = [name for name, _ in (*hf.named_modules(), *hf.named_parameters())]
    of_mixers = tuple(f"{name}." for name in mixers)
    present = {_pattern(name) for name in names if not name.startswith(of_mixers)}
    brought = {name: style for name, style in (hf.tp_plan or {}).items() if name not in added and name in present}
    # # Experts that `expert_parallel` does not know stay whole on every rank: their fused tensors are no linear layers.
    brought = {name: style for name, style in brought.items() if not name.rpartition(".")[0].endswith(".experts")}
    if own:
        brought = {name: style for name, style in brought.items() if style not in _GATHERED}
    plan = _read(brought, type(hf).__name__) | added
    if not any(style.how == "row" for style in plan.values()):
        raise ConfigError(
            f"{type(hf).__name__} brings no tensor-parallel plan, so its layers cannot be divided. Set "
            "policy.dtensor_cfg.tensor_parallel_size=1, or give policy.dtensor_cfg.custom_parallel_plan: a mapping "
            "from names such as 'model.layers.*.self_attn.q_proj' to 'colwise' or 'rowwise'."
        )
    return plan | _vocabulary(hf)


def rows_divided(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the linear layers whose inputs tensor-parallel ranks divide, and whose outputs they add.

    Raises:
        ConfigError: Ranks add other things too: outputs of experts or of recurrent layers, or means of norms.
    """
    plan = plan_for(hf)
    other = next((name for name, style in plan.items() if style.how not in ("column", "row", "vocabulary")), None)
    other = other or next((name for name, parameter in hf.named_parameters() if parameter.dim() > 2), None)
    if other is not None:
        raise ConfigError(
            f"policy.zero_mismatch=true with tensor-parallel ranks needs layers of which ranks add outputs of linear "
            f"layers only, and {type(hf).__name__} has {other!r}. Set policy.dtensor_cfg.tensor_parallel_size=1."
        )
    return [module for name, module in hf.named_modules() if style_of(name, plan) == ROW]


def _recurrent(mixers: Mapping[str, Mixer]) -> dict[str, Style]:
    """Return styles that divide the recurrent layers by their heads.

    Names have layer numbers, because other layers may have modules of the same names.
    """
    found: dict[str, Style] = {}
    for name, mixer in mixers.items():
        styles = {
            child: Style("column", heads=parts, dim=mixer.axes.get(child)) for child, parts in mixer.columns.items()
        }
        styles |= {child: Style("norm", groups=groups) for child, groups in mixer.norms.items()}
        styles |= {**dict.fromkeys(mixer.sums, Style("sum")), mixer.out: ROW}
        found |= {f"{name}.{child}": style for child, style in styles.items()}
    return found


def _pattern(name: str) -> str:
    """Return a name with `*` for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def made_without_weights(config: PretrainedConfig, *, scores: bool = False) -> PreTrainedModel:
    """Make a model on the meta device (one second for 70B parameters).

    Args:
        scores: whether the model has a scalar head.

    Raises:
        ConfigError: transformers cannot make a model from the configuration.
    """
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config)
    except (*CANNOT_BE_MADE, KeyError, IndexError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{kind.__name__} cannot make a model of the type {config.model_type}: {said}") from error
    return model


def shared_experts(hf: PreTrainedModel, blocks: Iterable[str], planned: Collection[str]) -> dict[str, Style]:
    """Return styles for the shared experts in blocks, which are feed-forward layers that the plan does not name.

    Ranks sum the outputs of a block, so every term of that sum must be divided. A feed-forward layer is recognized by
    its two or more linear layers: one maps from an inner width to the hidden size, and the others map from the hidden
    size to the inner width, or to twice the inner width if they are fused.

    Args:
        blocks: names of the modules whose outputs ranks sum.
        planned: names of modules and parameters that the plan divides or that are experts.
    """
    found: dict[str, Style] = {}
    for block in blocks:
        for name, module in hf.get_submodule(block).named_modules(prefix=block):
            is_part = any(name == other or name.startswith(f"{other}.") for other in planned)
            has_part = any(other.startswith(f"{name}.") for other in planned)
            if not (is_part or has_part or name == block):
                found |= {f"{name}.{child}": style for child, style in _feed_forward(hf, module).items()}
    return found


def _feed_forward(hf: PreTrainedModel, module: nn.Module) -> dict[str, Style]:
    """Return the styles of a module's linear layers by name, or an empty dict if it is not a feed-forward layer."""
    width = getattr(hf.config.get_text_config(), "hidden_size", None)
    linear = {name: child for name, child in module.named_children() if hasattr(child, "out_features")}
    down = [name for name, child in linear.items() if child.out_features == width]
    if len(down) > 1:  # the inner width equals the hidden size
        down = [name for name in down if name in _DOWN]
    if len(linear) < 2 or len(down) != 1:
        return {}
    inner = int(linear[down[0]].in_features)  # type: ignore[arg-type]
    styles: dict[str, Style] = {down[0]: ROW}
    for name, child in linear.items():
        if name == down[0]:
            continue
        if child.in_features != width or child.out_features not in (inner, 2 * inner):
            return {}
        styles[name] = COLUMN if child.out_features == inner else Style("column", (inner, inner))
    return styles


def style_of(name: str, plan: Plan) -> Style | None:
    """Return the style of a module or parameter name, or None if the plan does not contain it."""
    return plan.get(name, plan.get(_pattern(name)))


def _read(plan: Mapping[str, Any], owner: str) -> dict[str, Style]:
    """Convert a plan with names of transformers' styles, without output heads, which `_vocabulary` divides."""
    read = {}
    for name, style in plan.items():
        known = style if isinstance(style, Style) else _FROM_TRANSFORMERS.get(style)
        is_head = style == "colwise_gather_output" and "layers" not in name
        if known is None and style not in _KNOWN_WHOLE and not is_head:
            raise ConfigError(
                f"the tensor-parallel plan of {owner} divides {name!r} as {style!r}, which is not known here. Use "
                f"{', '.join(_FROM_TRANSFORMERS)}, or a nemo_rl.models.huggingface.tensor_plans.Style."
            )
        if known is not None:
            read[name] = known
    return read


def _vocabulary(hf: PreTrainedModel) -> dict[str, Style]:
    """Return styles for the input embedding and for the output head if it is one of a vocabulary."""
    names = {id(module): name for name, module in hf.named_modules()}
    ends = (hf.get_input_embeddings(), hf.get_output_embeddings())
    return {names[id(module)]: VOCABULARY for module in ends if module is not None and id(module) in names}
