"""Checks of the models of a run next to the policy: their devices, backends and lengths."""

from collections.abc import Mapping

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.model import check_backend, check_one_layout, check_trainable
from nemo_rl.config.rules.placement.roles import Role
from nemo_rl.config.rules.placement.topology import divide_cluster, model_ranks, parallel_sizes
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.utils.errors import ConfigError


def check_placements(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Every model but the policy has devices; other rules divide the cluster and need that.

    Args:
        models: the models of the run; the name of each is the name of its section.
        cluster: the machines.
    """
    for name in models:
        if name != "policy":
            yield from _check_placement(name, models, cluster)


def check_second_models(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Every model but the policy has devices and a backend, reads the longest answers, and can be trained if it is.

    Args:
        models: the models of the run; the name of each is the name of its section.
        cluster: the machines.
    """
    misplaced = list(check_placements(models, cluster))
    yield from misplaced
    longest = models["policy"].section.max_total_sequence_length
    for name, role in models.items():
        if name == "policy":
            continue
        yield from check_backend(name, role.section)
        if role.section.max_total_sequence_length < longest:
            yield (
                f"{name}.max_total_sequence_length={role.section.max_total_sequence_length} is less than "
                f"policy.max_total_sequence_length={longest}: the {name} could not read the longest answers. "
                "Set both to the same value."
            )
        yield from check_one_layout(name, role.section)
    if not misplaced:
        yield from _check_updates(models, cluster)


def _check_placement(name: str, models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """The model that it shares devices with exists, or the cluster has devices for both it and the policy."""
    role, others = models[name], [other for other in models if other != name]
    host = role.shares_with
    if host is not None:
        if host not in others:
            yield f"{name}.colocated.with_model={host} is no other model of the run. There are: {', '.join(others)}."
        elif host != "policy" and models[host].shares_with is not None:
            yield (
                f"{name}.colocated.with_model={host}, and {host} uses the devices of {models[host].shares_with}. Set "
                f"{name}.colocated.with_model={models[host].shares_with}."
            )
        return
    if not cluster.uses_gpu:
        return
    key, resources = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes", role.section.placement.resources
    if getattr(resources, key) is None:
        yield (
            f"{name}.colocated.enabled=false needs {name}.colocated.resources.{key}: how many of the cluster's "
            f"devices the {name} has."
        )
        return
    left = divide_cluster(cluster, models)["policy"]
    if left.num_nodes < 1 or left.gpus_per_node < 1:
        yield (
            f"{name}.colocated.resources.{key}={getattr(resources, key)} leaves no device for the policy: "
            f"cluster has {cluster.num_nodes} x {cluster.gpus_per_node} GPUs. Lower it, or set "
            f"{name}.colocated.enabled=true."
        )


def _check_updates(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """A trained model has an optimizer, and its updates divide into its data-parallel ranks."""
    for name, ranks in model_ranks(cluster, models).items():
        role = models[name]
        if name == "policy" or not role.trains or ranks < 1:
            continue
        yield from check_trainable(role.section, name)
        try:
            sizes = parallel_sizes(role.section, ranks)
        except ConfigError as error:
            yield f"{name}: {error}"
            continue
        shards, batch = sizes["dp_replicate"] * sizes["dp_shard"], role.section.train_global_batch_size
        if batch % shards:
            yield (
                f"{name}.train_global_batch_size={batch} does not divide into {shards} data-parallel ranks. "
                f"Set a multiple of {shards}."
            )
