"""Use the model under evaluation on engines of the run or at another server.

Invariant: an evaluation at an endpoint starts no engine, reserves no GPU or CPU for one, and reads no file of a model.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from nemo_rl.config.base.section import Section
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.schema.algorithms.evaluation import EvalDataConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.cluster.node_checks import Shared, check_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutLimits
from nemo_rl.models.generation.factory import engine_settings, make_engines, sampling_params
from nemo_rl.models.generation.interfaces import GenerationInterface, SamplingParams
from nemo_rl.models.generation.remote.chats import text_tokenizer
from nemo_rl.models.generation.remote.check import check_endpoint
from nemo_rl.models.generation.remote.model import ChatModel
from nemo_rl.utils.errors import EndpointUnusableError

_UNBOUNDED = 2**40
"""Limit of a conversation's tokens if only the server knows the model's context. No conversation reaches it."""


def tokenizer_of(config: EvalMasterConfig) -> TokenizerType:
    """Return the tokenizer of the model, or a substitute that encodes texts if another server has the model."""
    return get_tokenizer(config.tokenizer) if config.generation.endpoint is None else text_tokenizer()


def data_of(config: EvalMasterConfig) -> EvalDataConfig:
    """Return the `data` section. For an endpoint, it has no limit of tokens, because tokens cannot be counted."""
    if config.generation.endpoint is None:
        return config.data
    return config.data.model_copy(update={"max_input_seq_length": None})


def limits_of(config: EvalMasterConfig) -> RolloutLimits:
    """Return the limits of the rollouts."""
    context = config.generation.engine.max_model_len if config.generation.endpoint is None else _UNBOUNDED
    return RolloutLimits(context, config.eval.max_rollout_turns, config.cluster.timeouts.rollout_s)


def sampling_of(config: EvalMasterConfig, tokenizer: TokenizerType) -> SamplingParams:
    """Return the sampling parameters. For an endpoint, they leave out the end token, which the server knows."""
    generation = config.generation
    if generation.endpoint is None:
        return sampling_params(config.policy, tokenizer.eos_token_id, validation=False)
    return SamplingParams(
        temperature=generation.temperature,
        top_k=None if generation.top_k in (None, -1, 0) else generation.top_k,
        top_p=generation.top_p,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        stop_strings=tuple(generation.stop_strings or ()),
        bad_words=tuple(generation.bad_words or ()),
    )


def require_model(config: EvalMasterConfig, loop: EventLoopThread) -> None:
    """Check that the endpoint has the model. Do nothing for engines.

    Args:
        loop: event loop that sends the request.

    Raises:
        ConfigError: the endpoint cannot be reached, refuses the key, or does not have the model.
    """
    endpoint = config.generation.endpoint
    if endpoint is not None:
        loop.run(check_endpoint(endpoint), 4 * endpoint.timeout_s, "The check of generation.endpoint")


def start_model(config: EvalMasterConfig, tokenizer: TokenizerType, resources: ExitStack) -> GenerationInterface:
    """Start the engines, or create the client of the endpoint.

    Args:
        tokenizer: the result of `tokenizer_of`, or the user's own tokenizer.
        resources: stack that stops the started processes when it is closed.
    """
    if config.generation.endpoint is not None:
        model: GenerationInterface = ChatModel(config.generation.endpoint, tokenizer)
        resources.callback(model.shutdown)
        return model
    cluster = config.cluster
    settings = engine_settings(config.policy, cluster, config.eval.seed, load_weights=True)
    bundles = _bundles(cluster)
    resources.callback(bundles.shutdown)
    bundles.get_placement_groups()
    folders = {"generation.model_name": config.policy.model_name, "tokenizer.name": config.tokenizer.name}
    check_nodes([bundles], Shared(folders))
    engines = make_engines(replace(settings, can_sleep=False), bundles, cluster)
    resources.callback(engines.shutdown)
    return engines


@contextmanager
def answers_come(model: ChatModel | None, *, is_first: bool) -> Iterator[None]:
    """Raise an error for a batch without any answer. Its results would be stored as wrong answers of the model.

    Args:
        model: client of the endpoint, or None if engines have the model. Engines that fail end the run themselves.
        is_first: whether no answer is stored yet. In this case, refused requests count as an error of the run too. In a
            later batch, the endpoint may refuse each prompt for its content.

    Raises:
        EndpointUnusableError: the endpoint gave no answer during the block, although it got requests.
    """
    before = None if model is None else replace(model.counts)
    yield
    if model is None or before is None or model.counts.answers > before.answers:
        return
    failed = model.counts.without_answer - before.without_answer
    refused = model.counts.refused - before.refused
    if failed > refused or (failed and is_first):
        raise EndpointUnusableError(
            f"The endpoint gave no answer to any of {failed} conversations, so none of them is written. With "
            f"eval.save_path the same command continues after the last batch. The last error: {model.counts.last_error}"
        )


@contextmanager
def key_stays_here(config: EvalMasterConfig) -> Iterator[None]:
    """Keep the key of the endpoint out of the environment variables of processes that start during the block.

    Otherwise agent programs could read the key. A variable that the section of an environment names is kept.
    """
    variable = None if config.generation.endpoint is None else config.generation.endpoint.api_key_env
    if variable is None or _is_named(variable, config):
        yield
        return
    key = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if key is not None:
            os.environ[variable] = key


def _is_named(variable: str, config: EvalMasterConfig) -> bool:
    """Return whether the environment's section, or the section of its grader, names a variable."""
    section = config.env.get(config.data.env_name)
    return variable in _keys_in(section.model_dump() if isinstance(section, Section) else section)


def _keys_in(value: Any) -> Iterator[str]:
    """Yield the value of each `api_key_env` in nested mappings and lists."""
    if isinstance(value, Mapping):
        if isinstance(value.get("api_key_env"), str):
            yield value["api_key_env"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _keys_in(inner)


def _bundles(cluster: ClusterConfig) -> RayVirtualCluster:
    """Reserve one bundle for an engine on each GPU, or `ranks_per_node` bundles on each CPU machine."""
    return RayVirtualCluster(
        [cluster.policy_ranks_per_node] * cluster.num_nodes,
        use_gpus=cluster.uses_gpu,
        max_colocated_worker_groups=1,
        num_gpus_per_node=max(cluster.gpus_per_node, 1),
        name="evaluation",
        placement_group_strategy="STRICT_SPREAD",
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )
