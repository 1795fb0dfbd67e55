"""Describe a draft model: its sizes, the policy's layers that it reads, its `config.json` and its tensor names.

The draft model is an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) as vLLM loads it (`LlamaForCausalLMEagle3`). The
module does not import torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.utils.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting", "attention_bias")
"""Settings of variants that vLLM loads but that cannot be trained here."""


@dataclass(frozen=True)
class DraftShape:
    """The sizes of a draft model."""

    hidden_size: int
    """Width of the draft model and of the policy's token embeddings, which it uses."""
    target_hidden_size: int
    """Width of the policy's hidden states."""
    intermediate_size: int
    """Width of the feed-forward layers."""
    num_heads: int
    """Number of query heads of each layer."""
    num_key_value_heads: int
    """Number of key heads, and of value heads, of each layer."""
    head_dim: int
    """Width of a head."""
    num_layers: int
    """Number of decoder layers."""
    vocab_size: int
    """Vocabulary size of the policy."""
    draft_vocab_size: int
    """Number of tokens that the draft model can propose."""
    rms_norm_eps: float
    """Epsilon that each norm adds to the mean square."""
    rope_theta: float
    """Base of the rotary frequencies."""
    max_positions: int
    """Largest number of positions of a sequence of the policy."""
    tapped_layers: tuple[int, ...]
    """Hidden states of the policy that the draft model reads, given by the number of decoder layers before each; 0 is
    the embedding. The numbers are ascending, the order in which vLLM concatenates hidden states."""
    norm_before_residual: bool = False
    """Whether the residual connection of the first layer starts after its norm."""

    @property
    def proposes_all(self) -> bool:
        """True if the draft model can propose every token of the policy."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        width, heads = self.hidden_size, (2 * self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        # # The first layer also reads the embedding, and has one norm for each input.
        more = (heads - self.num_heads * self.head_dim) * width + width
        each = heads * width + 3 * width * self.intermediate_size + 2 * width
        read = self.target_hidden_size * len(self.tapped_layers) * width
        return read + self.num_layers * each + more + width + self.draft_vocab_size * width

    @classmethod
    def for_model(cls, model: Any, num_layers: int = 1, tapped_layers: Sequence[int] | None = None) -> "DraftShape":
        """Return the shape of a new draft model: layers like the policy's, with its vocabulary.

        Args:
            model: Hugging Face configuration of the policy's text model.
            num_layers: decoder layers of the draft model.
            tapped_layers: field of `DraftShape`. If None, an early, a middle and a late layer, as in vLLM.
        """
        heads = int(model.num_attention_heads)
        dim = getattr(model, "head_dim", None) or model.hidden_size // heads
        if getattr(model, "qk_rope_head_dim", None):  # latent attention has no key heads
            dim = model.hidden_size // heads
        count = int(model.num_hidden_layers)
        taps = tuple(sorted(set(tapped_layers))) if tapped_layers is not None else _default_taps(count)
        return cls(
            hidden_size=int(model.hidden_size),
            target_hidden_size=int(model.hidden_size),
            intermediate_size=int(model.intermediate_size),
            num_heads=heads,
            num_key_value_heads=int(getattr(model, "num_key_value_heads", None) or heads),
            head_dim=int(dim),
            num_layers=num_layers,
            vocab_size=int(model.vocab_size),
            draft_vocab_size=int(model.vocab_size),
            rms_norm_eps=float(getattr(model, "rms_norm_eps", 1e-6)),
            rope_theta=rope_theta_of(model),
            max_positions=int(model.max_position_embeddings),
            tapped_layers=taps,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str, model: Any) -> "DraftShape":
        """Return the shape of a published draft model.

        Args:
            values: the content of the draft model's `config.json`.
            name: name of the draft model, for messages.
            model: Hugging Face configuration of the policy's text model.

        Raises:
            ConfigError: the model is not an EAGLE-3 head, or is a variant that cannot be trained.
        """
        named = (values.get("architectures") or ["none"])[0]
        if named not in _ARCHITECTURES:
            raise ConfigError(
                f"policy.draft.model_name={name!r} has the architecture {named}. Only EAGLE-3 heads can be trained: "
                f"{', '.join(_ARCHITECTURES)}."
            )
        eagle = values.get("eagle_config") or {}
        others = [key for key in _UNSUPPORTED if values.get(key) or eagle.get(key)]
        if not eagle.get("use_aux_hidden_state", True):
            others.append("use_aux_hidden_state=false")
        if others:
            raise ConfigError(
                f"policy.draft.model_name={name!r} sets {', '.join(others)}. Draft models of this kind cannot be "
                "trained. Use one without, or leave model_name out to start a new one."
            )
        taps = values.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        heads = int(values["num_attention_heads"])
        vocabulary = int(values["vocab_size"])
        return cls(
            hidden_size=int(values["hidden_size"]),
            target_hidden_size=int(values.get("target_hidden_size") or values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
            num_layers=int(values.get("num_hidden_layers", 1)),
            vocab_size=vocabulary,
            draft_vocab_size=int(values.get("draft_vocab_size") or vocabulary),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(values),
            max_positions=int(values.get("max_position_embeddings", 2048)),
            tapped_layers=tuple(sorted(set(taps))) if taps else _default_taps(int(model.num_hidden_layers)),
            norm_before_residual=bool(values.get("norm_before_residual", False)),
        )

    def config(self) -> dict[str, Any]:
        """Return the `config.json` from which vLLM and `read` build this model."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "norm_before_residual": self.norm_before_residual,
            "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.tapped_layers),
                "use_aux_hidden_state": True,
            },
        }

    def save_config(self, folder: Path) -> None:
        """Write `config.json` into a folder, which is made if it does not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n", encoding="utf-8")


def _default_taps(num_layers: int) -> tuple[int, ...]:
    """Return vLLM's default: hidden states after the second layer, in the middle, and before the last three layers."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def rope_theta_of(model: Any) -> float:
    """Return the base of a model's rotary frequencies, or 10,000 if its configuration does not set it."""
    return _rope_theta({key: getattr(model, key, None) for key in ("rope_theta", "rope_parameters")})


def _rope_theta(values: Mapping[str, Any]) -> float:
    parameters = values.get("rope_parameters") or {}
    return float(values.get("rope_theta") or parameters.get("rope_theta") or 10_000.0)


PREFIX = "draft."
"""Prefix of the draft model's tensors in a stream of weights."""
_MODULE, _PUBLISHED = "layers.0.", "midlayer."


def published(name: str, num_layers: int) -> str:
    """Return a tensor's name in published EAGLE-3 heads, which call a single layer `midlayer`."""
    if num_layers == 1 and name.startswith(_MODULE):
        return _PUBLISHED + name.removeprefix(_MODULE)
    return name


def in_module(name: str) -> str:
    """Return the name in `DraftHead` of a tensor of a published EAGLE-3 head."""
    name = name.removeprefix("model.")
    return _MODULE + name.removeprefix(_PUBLISHED) if name.startswith(_PUBLISHED) else name
