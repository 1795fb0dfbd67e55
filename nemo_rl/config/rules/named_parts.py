"""Check parts that are chosen by name, and the names of workers."""

from collections.abc import Collection, Mapping

from nemo_rl.config.base.names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.utils.errors import did_you_mean


def check_named_parts(parts: Mapping[str, NamedPartConfig]) -> Findings:
    """Check that only a user's classes have `kwargs`.

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
    """Refuse dynamic sampling, which compares rewards, because distillation trains without rewards."""
    if source.name == "dynamic_sampling":
        yield (
            "distillation.rollout_source.name=dynamic_sampling keeps prompts whose rewards differ, but distillation "
            "trains without rewards. Use fresh, or the dotted path of a class."
        )


def check_venvs(cluster: ClusterConfig, kinds: Collection[str]) -> Findings:
    """Check that each name in `cluster.venvs` is a kind of worker in the run.

    Args:
        kinds: kinds of workers of the run.
    """
    for name in cluster.venvs:
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            yield f"cluster.venvs.{name}: this run has no such workers; it has: {known}.{did_you_mean(name, kinds)}"
