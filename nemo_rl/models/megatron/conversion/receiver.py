"""Load the weights that an engine is sent into its Megatron Core model, one hub tensor at a time, in any order.

Invariant: tensors whose name or shape does not fit the model are refused, and missing tensors are reported by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.models.huggingface.tensor_files import Box
from nemo_rl.models.megatron.conversion.holdings import Groups, held_here, holders
from nemo_rl.models.megatron.conversion.importer import fill, keep_precision
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import rules_for
from nemo_rl.utils.errors import GenerationError


@dataclass(frozen=True)
class _Sent:
    """A received tensor, as the source of its parts."""

    tensor: Tensor

    def like(self, name: str) -> Tensor:
        return self.tensor

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self.tensor if box is None else self.tensor[box]


class HubReceiver:
    """Receives the tensors of weight updates; the constructor is collective over pipeline and experts.

    Args:
        chunks: the rank's virtual stages.
        hf_config: Hugging Face configuration of the model.

    Raises:
        CheckpointError: the model has parameters that the configuration does not describe, or lacks some.
    """

    def __init__(self, chunks: Sequence[nn.Module], hf_config: PretrainedConfig) -> None:
        self._chunks, self._rules, self._groups = chunks, rules_for(hf_config), Groups.current()
        self._uses: dict[str, list[tuple[Rule, int, Part]]] = {}
        """Uses of each hub tensor: rule, number of the part in the rule, and part."""
        for rule in self._rules.by_parameter.values():
            for parts in (rule.parts, rule.stacked_parts):
                for index, part in enumerate(parts):
                    self._uses.setdefault(part.name, []).append((rule, index, part))
        self._held: dict[str, Tensor] = {}
        self._missing: dict[tuple[str, int], str] = {}
        self.begin()
        holders(self._held, self._rules, self._groups)

    def begin(self) -> None:
        """Start an update: expect every tensor, and look up the parameters, because moving a model replaces buffers."""
        self._held = held_here(self._chunks, self._rules, self._groups)
        self._missing = {}
        for name, uses in self._uses.items():
            for rule, index, _ in uses:
                if rule.parameter in self._held:
                    keep_precision(self._held[rule.parameter], rule)
                    self._missing.setdefault((rule.parameter, index), name)

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into the parameters of this rank that use it.

        Raises:
            GenerationError: the model has no such tensor, or its shape differs.
        """
        if name not in self._uses:
            raise GenerationError(f"The engine's model has no tensor named {name}.")
        for rule, index, part in self._uses[name]:
            held = self._held.get(rule.parameter)
            if held is None:
                continue
            shape = rule.part_shapes(held.shape, self._groups.num_shards(rule))[index]
            if tensor.dim() != len(shape) + (part.expert is not None) or part.shape_in(tensor.shape) != shape:
                raise GenerationError(
                    f"{name} was sent with shape {tuple(tensor.shape)}, but {rule.parameter} needs {shape} of it."
                )
            fill(held, rule, {index: part}, _Sent(tensor), self._groups)
            self._missing.pop((rule.parameter, index), None)

    def unbound(self) -> list[str]:
        """Return the hub tensors that have not been received since `begin`."""
        return sorted(set(self._missing.values()))
