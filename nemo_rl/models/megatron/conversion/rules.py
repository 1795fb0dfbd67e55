"""Rules that map every parameter of a whole Megatron Core model to hub tensors, and back.

Data and small functions, without megatron. Invariant: each hub tensor and each parameter belongs to exactly one
bundle.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.models.megatron.conversion.layer_rules import FAMILIES
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.utils.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCALAR_HEAD = "score.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Rules:
    """Rules of all parameters of a model."""

    by_parameter: dict[str, Rule]
    """Rules by parameter name, in the order of the model."""
    num_layers: int
    """Number of layers of the model, without those for multi-token prediction."""
    num_mtp_layers: int
    """Number of layers for multi-token prediction that are part of the model."""
    is_tied: bool
    """Whether the head is the embedding."""
    has_scalar_head: bool
    """Whether the head is a reward model's scalar head."""

    def bundles(self) -> list[list[Rule]]:
        """Group the rules whose parameters share a hub tensor, in model order: single rules, or a stack's experts."""
        found: dict[str, list[Rule]] = {}
        for rule in self.by_parameter.values():
            if not rule.copy_of_tied:
                found.setdefault(rule.parts[0].name, []).append(rule)
        return list(found.values())

    def hub_names(self) -> list[str]:
        """Return the names of all hub tensors, in the order of the bundles."""
        return list(dict.fromkeys(part.name for bundle in self.bundles() for rule in bundle for part in rule.parts))

    def untrained_mtp(self, names: Iterable[str]) -> list[str]:
        """Select the hub names of layers for multi-token prediction that are not part of the model."""
        return [name for name, layer in _numbered(names) if layer >= self.num_layers + self.num_mtp_layers]

    def copies_in_mtp(self, names: Iterable[str]) -> dict[str, str]:
        """Select the hub names of copies of embedding and head in the layers for multi-token prediction.

        Returns:
            Name of the copy to name of the tensor that it repeats.
        """
        own = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        repeated = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": EMBEDDING if self.is_tied else HEAD}
        found = {name: name.split(".", 3)[-1] for name, layer in _numbered(names) if layer in own}
        return {name: repeated[suffix] for name, suffix in found.items() if suffix in repeated}

    def derived(self, names: Iterable[str]) -> list[str]:
        """Select the hub names of tensors in old files that can be computed from the configuration."""
        return [name for name in names if _DERIVED.search(name)]


def rules_for(hf_config: PretrainedConfig, *, has_scalar_head: bool = False, num_mtp_layers: int = 0) -> Rules:
    """Build the rules of a model.

    Args:
        hf_config: Hugging Face configuration of the model.
        has_scalar_head: whether a head with one output, whole on every rank, replaces the head for tokens.
        num_mtp_layers: number of layers for multi-token prediction that are part of the model.

    Raises:
        ConfigError: there are no rules for its family, or it has no layers for multi-token prediction.
    """
    layers = FAMILIES.get(hf_config.model_type)
    if layers is None:
        raise ConfigError(
            f"Weights of model_type={hf_config.model_type!r} cannot be converted for Megatron Core. Families that can: "
            f"{', '.join(sorted(FAMILIES))}. policy.dtensor_cfg.enabled=true trains others."
        )
    tied = bool(hf_config.tie_word_embeddings) and not has_scalar_head
    head = Rule(OUTPUT, (Part(EMBEDDING if tied else HEAD),), dim=0, copy_of_tied=tied)
    if has_scalar_head:
        head = Rule(OUTPUT, (Part(SCALAR_HEAD),))
    rules = [
        Rule("embedding.word_embeddings.weight", (Part(EMBEDDING),), dim=0),
        *(rule for number in range(hf_config.num_hidden_layers) for rule in layers.of(hf_config, number)),
        Rule("decoder.final_layernorm.weight", (Part("model.norm.weight"),)),
        *(rule for depth in range(num_mtp_layers) for rule in layers.of_mtp(hf_config, depth)),
        head,
    ]
    by_parameter = {rule.parameter: rule for rule in rules}
    return Rules(by_parameter, hf_config.num_hidden_layers, num_mtp_layers, tied, has_scalar_head)


def _numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the names of layers' tensors with the numbers of the layers."""
    for name in names:
        found = _LAYER.match(name)
        if found:
            yield name, int(found[1])


def hub_tensors(rules: Rules, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield all hub tensors, made from whole parameters.

    Args:
        rules: rules of the model.
        read: reads a parameter by its name; called once for each. At most one, or one layer's experts, are in memory.

    Yields:
        Name, tensor, and whether it keeps its dtype; in the order of the model.
    """
    for bundle in rules.bundles():
        if len(bundle) == 1:
            whole = read(bundle[0].parameter)
            for index, part in enumerate(bundle[0].parts):
                yield part.name, bundle[0].joined(index, [whole]), bundle[0].full_precision
            continue
        stack = Tensor()
        for number, rule in enumerate(bundle):
            whole = read(rule.parameter)
            for index, part in enumerate(rule.parts):
                values = rule.joined(index, [whole])
                if number == index == 0:
                    stack = values.new_empty(part.tensor_shape(values.shape, len(bundle)))
                part.of(stack).copy_(values)
        yield bundle[0].parts[0].name, stack, bundle[0].full_precision
