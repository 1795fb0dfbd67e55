"""Checks of the models of a run next to the policy: teachers, critics, and models that reward answers.

They concern devices, backends, lengths, and the keys of on-policy distillation.
"""

from collections.abc import Mapping

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.model import check_backend, check_one_layout, check_trainable
from nemo_rl.config.rules.topology import Role, divide_cluster, model_ranks, parallel_sizes, without_devices
from nemo_rl.config.schema.algorithms.distillation import DistillationLossConfig, TeacherConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.judges import JudgeEngineConfig, RewardModelEnvironmentConfig
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


type Judges = Mapping[str, RewardModelEnvironmentConfig | JudgeEngineConfig]
"""Sections of models with devices of their own that reward answers, by their place in the configuration."""


def left_by_judges(cluster: ClusterConfig, judges: Judges) -> ClusterConfig:
    """Return the part of a cluster that judges leave to the models of the run; all of it if their devices are wrong."""
    if any(check_judges(judges, cluster)):
        return cluster
    for judge in judges.values():
        cluster = without_devices(cluster, judge.resources)
    return cluster


def check_judges(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that the judges that data names may be used, and that the cluster has devices for them.

    Args:
        judges: their sections.
        cluster: the machines.
    """
    for place, judge in judges.items():
        if isinstance(judge, RewardModelEnvironmentConfig) and not judge.enabled:
            yield f"{place}.enabled=false, but data names the environment reward_model. Set it to true."
        if cluster.rollout_runners:
            what = "a reward model" if isinstance(judge, RewardModelEnvironmentConfig) else "engines"
            yield (
                f"cluster.rollout_runners={cluster.rollout_runners}: each runner would start {what} of its own. "
                f"With {place} use cluster.rollout_runners=0."
            )
    if cluster.uses_gpu and judges:
        yield from _check_gpus(judges, cluster)


def _check_gpus(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that all judges together leave devices for the policy."""
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    has = getattr(cluster, key)
    asked = {f"{place}.resources.{key}": getattr(judge.resources, key) for place, judge in judges.items()}
    for name in (name for name, number in asked.items() if number is None):
        yield f"{name} is not set: how many of the cluster's devices this judge has."
    if sum(number or 0 for number in asked.values()) >= has:
        given = " and ".join(f"{name}={number}" for name, number in asked.items() if number is not None)
        verb = "leaves" if len(asked) == 1 else "leave"
        yield f"{given} {verb} no device for the policy: cluster.{key}={has}. Lower it, or use more devices."


def check_teacher(teacher: TeacherConfig) -> Findings:
    """The teacher is a language model without adapters; `second_models` checks the rest."""
    for key in teacher.adapter_keys:
        yield f"teacher.{key}.enabled=true adds untrained adapters. Set it to false."
    if teacher.reward_model_cfg.enabled:
        yield "teacher.reward_model_cfg.enabled=true makes a model that scores whole answers. Set it to false."


def check_distillation_loss(loss: DistillationLossConfig) -> Findings:
    """Check that the weight of the mixed loss leaves both of its parts."""
    if loss.kl_type == "mixed" and loss.mixed_kl_weight in (0.0, 1.0):
        alone = "forward" if loss.mixed_kl_weight == 1 else "reverse"
        yield (
            f"loss_fn.mixed_kl_weight={loss.mixed_kl_weight:g} leaves only the {alone} part of loss_fn.kl_type=mixed. "
            f"Set loss_fn.kl_type={alone}, or a weight between 0 and 1."
        )
