"""Rules on the sections of parts that are chosen by name."""

from collections.abc import Mapping

from nemo_rl.config.base.part_names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.named_part import NamedPartConfig


def check_named_parts(parts: Mapping[str, NamedPartConfig]) -> Findings:
    """Only a class of the user's own has `kwargs`.

    Args:
        parts: the sections by their dotted keys.
    """
    for key, part in parts.items():
        if part.kwargs and not is_own_class(part.name):
            yield (
                f"{key}.kwargs={part.kwargs} are arguments of a class of your own, and {key}.name={part.name} is built "
                f"in. Take them away, or give {key}.name the dotted path of a class."
            )


def check_source_of_distillation(source: NamedPartConfig) -> Findings:
    """Dynamic sampling compares rewards, which distillation does without."""
    if source.name == "dynamic_sampling":
        yield (
            "distillation.rollout_source.name=dynamic_sampling keeps prompts whose rewards differ, but distillation "
            "trains without rewards. Use fresh, or the dotted path of a class."
        )
