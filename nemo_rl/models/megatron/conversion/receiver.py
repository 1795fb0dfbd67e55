"""Give a Megatron Core model new weights, one hub tensor at a time and in any order: what an engine is sent.

Invariant: a tensor is refused unless it is the model's, by name and shape; what got none of its tensors is named.
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
    """A tensor that was sent, as a source of its parts."""

    tensor: Tensor

    def like(self, name: str) -> Tensor:
        return self.tensor

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self.tensor if box is None else self.tensor[box]


class HubReceiver:
    """Takes the tensors of one update after the other; collective over pipeline and experts when it is made.

    Args:
        chunks: the rank's virtual stages.
        hf_config: of the model.

    Raises:
        CheckpointError: the model has parameters that the configuration does not describe, or lacks some.
    """

    def __init__(self, chunks: Sequence[nn.Module], hf_config: PretrainedConfig) -> None:
        self._chunks, self._rules, self._groups = chunks, rules_for(hf_config), Groups.current()
        self._uses: dict[str, list[tuple[Rule, int, Part]]] = {}
        """What each hub tensor is for: a part of a parameter, by its number in the rule."""
        for rule in self._rules.by_parameter.values():
            for parts in (rule.parts, rule.stacked_parts):
                for index, part in enumerate(parts):
                    self._uses.setdefault(part.name, []).append((rule, index, part))
        self._held: dict[str, Tensor] = {}
        self._missing: dict[tuple[str, int], str] = {}
        self.begin()
        holders(self._held, self._rules, self._groups)

    def begin(self) -> None:
        """Expect every tensor, for where the model is now: moving it makes new tensors of its buffers."""
        self._held = held_here(self._chunks, self._rules, self._groups)
        self._missing = {}
        for name, uses in self._uses.items():
            for rule, index, _ in uses:
                if rule.parameter in self._held:
                    keep_precision(self._held[rule.parameter], rule)
                    self._missing.setdefault((rule.parameter, index), name)

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor to where its values belong on this rank.

        Raises:
            GenerationError: the model has no such tensor, or another shape of it.
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
        """Hub tensors that have not come since `begin`."""
        return sorted(set(self._missing.values()))
