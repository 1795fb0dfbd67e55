"""Sample answers to all prompts, grade them and compute a report.

This module runs the loop of an evaluation, and starts and ends its processes: one environment and, unless another
server has the model (`models`), engines with the model's weights. Invariant: an evaluation uses the same rollouts,
environments and engines as training. Prompts with stored answers are not sampled again, and a finished evaluation
starts no processes.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import config_of
from nemo_rl.config.runs.dependent_keys import fill_dependent_keys
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.schema.env import keeps_rows, stop_strings_of
from nemo_rl.data.messages.content import text_rules
from nemo_rl.data.prompt_identity import PromptIdentities
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.registry import check_environment, env_class_path
from nemo_rl.environments.truth_check import check_truths, truth_grader
from nemo_rl.environments.user_environments import Start, environment_of, start_environment
from nemo_rl.environments.workers.loading import load_env_class
from nemo_rl.environments.workers.start import Environment
from nemo_rl.evals.models import (
    answers_come,
    data_of,
    key_stays_here,
    limits_of,
    require_model,
    sampling_of,
    start_model,
    tokenizer_of,
)
from nemo_rl.evals.prompts import EvalPrompts, EvaluationPrompts, GivenPrompts
from nemo_rl.evals.records import AnswerRecord, RecordStore
from nemo_rl.evals.report import EvalReport, make_report
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.host.console_bars import progress_bar
from nemo_rl.host.stop_signals import DeferredSignals
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.remote.model import ChatModel
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.utils.errors import ConfigError, RunInterruptedError
from nemo_rl.utils.logging_setup import show_messages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampler:
    """Sample answers of the model, and grade them."""

    runner: RolloutRunner
    sampling: SamplingParams
    remote: ChatModel | None = None
    """Client of the server that has the model, or None if engines of the run have it."""


@dataclass(frozen=True)
class EvalGeneration:
    """Model under evaluation. Its engines, if it has any, run only while prompts are sampled."""

    config: EvalMasterConfig
    """Checked configuration."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer that renders prompts and decodes answers."""

    def shutdown(self) -> bool:
        """Do nothing, because no process is running."""
        return True


class Evaluation(NamedTuple):
    """Result of `setup`, which contains everything that is determined before an evaluation starts a process."""

    generation: EvalGeneration
    dataloader: EvaluationPrompts
    master_config: EvalMasterConfig


def setup(
    master_config: EvalMasterConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    env: Any = None,
) -> Evaluation:
    """Prepare an evaluation for `run_env_eval`. Arguments that are omitted come from the configuration.

    Args:
        master_config: the configuration as an object, or as a dict, which is checked in the same way as a file.
        tokenizer: tokenizer of the model. With an endpoint, it only encodes the stored conversations.
        dataset: prompts (as in `data.datasets.user_data.given_data`).
        env: environment that grades in place of the configured one. The caller must pass it to `run_env_eval` too.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    show_messages()
    if isinstance(master_config, EvalMasterConfig):
        config = master_config
        fill_dependent_keys(config)
        config.check()
    else:
        config = config_of(master_config, EvalMasterConfig)
    _check_environment(config)
    check_engine_model(config.policy, config.cluster)
    tokenizer = tokenizer or tokenizer_of(config)
    name = config.data.env_name
    construct = env is None and name not in config.cluster.venvs
    check_environment(name, config.env.get(name, {}), tokenizer, construct=construct)
    prompts: EvaluationPrompts
    if dataset is None:
        stop, keeps = stop_strings_of(config.env, name), keeps_rows(config.env, name)
        prompts = EvalPrompts(data_of(config), tokenizer, stop, keeps_rows=keeps)
    else:
        prompts = GivenPrompts(dataset, config.data)
    return Evaluation(EvalGeneration(config, tokenizer), prompts, config)


def check_known_answers(config: EvalMasterConfig, prompts: EvaluationPrompts) -> None:
    """Check that the verifier accepts the known answers (with `environments.truth_check`).

    Raises:
        DataError: no known answer gets a reward.
    """
    name = config.data.env_name
    grader = None if name in config.cluster.venvs else truth_grader(name, config.env.get(name, {}))
    if grader is not None:
        check_truths(prompts.data_sets, {name: grader}, {str(None): name})


def evaluate(config: EvalMasterConfig) -> EvalReport:
    """Run the evaluation that a configuration describes, by `setup` and `run_env_eval`."""
    return run_env_eval(*setup(config)[:2])


def run_env_eval(
    vllm_generation: EvalGeneration,
    dataloader: EvaluationPrompts,
    env: Any = None,
    master_config: EvalMasterConfig | None = None,
) -> EvalReport:
    """Run an evaluation, or continue an interrupted one. The arguments are those of NeMo RL.

    Args:
        vllm_generation: first result of `setup`.
        dataloader: second result of `setup`.
        env: environment that grades (`environments.user_environments.environment_of`), or None for `data.env_name`.
        master_config: third result of `setup`, or None to take it from `vllm_generation`.

    Returns:
        The report, which is also written to `eval.save_path`.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used. This is raised before Ray starts.
        CheckpointError: `eval.save_path` is in use or damaged.
        RunInterruptedError: a signal ended the evaluation after a batch was written.
    """
    config, prompts = master_config or vllm_generation.config, dataloader
    environment = environment_of(config.data.env_name, env or _class_path(config))
    if env is None:
        check_known_answers(config, prompts)
    store = RecordStore(config, len(prompts))
    try:
        if store.num_prompts_done < len(prompts):
            started = _started(config, vllm_generation.tokenizer, environment)
            with started as sampler, deferred_signals(config) as signals:
                ask_all(config, prompts, store, sampler, signals)
        report = make_report(config, store.records)
        path = store.write_results(asdict(report))
    finally:
        store.close()
    if path is not None:
        logger.info("Answers and results: %s", path.parent)
    return report


def ask_all(
    config: EvalMasterConfig,
    prompts: EvaluationPrompts,
    store: RecordStore,
    sampler: Sampler,
    signals: DeferredSignals | None = None,
) -> None:
    """Sample answers to the prompts without answers, batch by batch.

    Args:
        store: store of the answers so far, to which new answers are added.
        sampler: sampler of answers, which also grades them.
        signals: signals that end the loop after a batch, or None to ignore signals.

    Raises:
        RunInterruptedError: a signal was received and prompts remain.
        EndpointUnusableError: as in `models.answers_come`.
    """
    wanted = config.eval
    size = config.generation.num_prompts_per_step
    total = len(prompts)
    identities = PromptIdentities()
    if store.num_prompts_done:
        identities.of(prompts.batch(0, store.num_prompts_done))  # counts equal prompts
    with progress_bar("evaluation, prompts", total) as bar:
        while store.num_prompts_done < total:
            bar.show(store.num_prompts_done)
            started, start = time.perf_counter(), store.num_prompts_done
            stop = min(start + size, total) if size > 0 else total
            batch = prompts.batch(start, stop)
            key = RolloutKey(wanted.seed, "evaluation", step=0, first_group=start, prompts=identities.of(batch))
            with answers_come(sampler.remote, is_first=not store.records):
                rollouts = sampler.runner.collect(batch, wanted.num_tests_per_prompt, sampler.sampling, key)
            topics = [prompts.topic(index) for index in range(start, stop)]
            records = [_record(t, start, batch, topics) for t in rollouts.trajectories]
            images = map(store.write_images, rollouts.trajectories)
            store.append([replace(record, images=found) for record, found in zip(records, images, strict=True)])
            num_right = sum(record.is_correct for record in store.records)
            logger.info(
                "%d of %d prompts, %.1f %% of the answers right, %.1f s",
                stop,
                total,
                100 * num_right / len(store.records),
                time.perf_counter() - started,
            )
            for name, value in rollouts.metrics.items():
                logger.info("%s %g", name, value)
            if signals is not None and signals.received is not None and stop < total:
                signals.all_is_saved(RunInterruptedError.exit_status)
                raise RunInterruptedError(
                    f"{signals.received.name} was received. The answers to {stop} of {total} prompts are written; "
                    "the same command continues."
                )


def _response_length(trajectory: Trajectory) -> int | None:
    """Return the number of tokens in a sample's answers, or None if the model's server gave no answers or no counts."""
    written = [message for log in trajectory.logs for message in log if "generation_logprobs" in message]
    if any(message.get("num_tokens", 0) is None for message in written):
        return None
    return None if trajectory.error is not None and not written else trajectory.response_length


def _logprob(trajectory: Trajectory) -> float | None:
    """Return the sum of the log-probabilities of a sample's answers, or None if the model's server gave none."""
    written = [
        message["generation_logprobs"] for log in trajectory.logs for message in log if "generation_logprobs" in message
    ]
    total = math.fsum(value for logprobs in written for value in logprobs.tolist())
    return None if math.isnan(total) or not written else total


def _reasoning(trajectory: Trajectory) -> str | None:
    """Return the reasoning that the model's server has separated from the answers, or None if there is none."""
    parts = [message["reasoning_content"] for message in trajectory.message_log if message.get("reasoning_content")]
    return "\n\n".join(parts) or None


def _record(trajectory: Trajectory, start: int, batch: BatchedDataDict[Any], topics: list[str | None]) -> AnswerRecord:
    row = trajectory.group_index
    info = batch["extra_env_info"][row] or {}
    truth = info.get("ground_truth")
    return AnswerRecord(
        idx=start + row,
        sample=trajectory.sample_index,
        prompt=trajectory.prompt_text,
        response=trajectory.response_text,
        ground_truth=None if truth is None else str(truth),
        answer=trajectory.answer,
        reward=trajectory.reward,
        outcome=str(trajectory.outcome),
        response_length=_response_length(trajectory),
        logprob=_logprob(trajectory),
        topic=topics[row],
        error=trajectory.error,
        reasoning=_reasoning(trajectory),
        agent_counts=trajectory.agent_counts,
    )


def _class_path(config: EvalMasterConfig) -> str:
    return env_class_path(config.data.env_name, config.env.get(config.data.env_name))


def _check_environment(config: EvalMasterConfig) -> None:
    """Check that `cons@k` has an environment that returns the extracted answer.

    An environment with its own Python is not checked, because its class may need packages that are missing here.
    """
    if config.data.env_name in config.cluster.venvs:
        return
    env_class, _ = load_env_class(_class_path(config))
    if config.eval.metric == "cons@k" and not env_class.gives_answers:
        raise ConfigError(
            f"eval.metric=cons@k compares extracted answers, but the environment {config.data.env_name!r} "
            f"({env_class.__name__}) gives none. Use pass@k, or set gives_answers in that class."
        )


@contextmanager
def deferred_signals(config: EvalMasterConfig) -> Iterator[DeferredSignals]:
    """Defer signals to the end of a batch, unless the evaluation writes no files."""
    signals = DeferredSignals(config.eval.signal_grace_s, "the evaluation ends when this batch is written")
    if config.eval.save_path is not None:
        signals.start()
    try:
        yield signals
    finally:
        signals.stop()


@contextmanager
def _started(
    config: EvalMasterConfig, tokenizer: PreTrainedTokenizerBase, environment: Environment | Start
) -> Iterator[Sampler]:
    """Start the model and the environment, and stop them at the end of the block if they were started here."""
    cluster, name = config.cluster, config.data.env_name
    with ExitStack() as resources:
        loop = EventLoopThread()
        resources.callback(loop.close)
        require_model(config, loop)
        download_models(model.model_name for _, _, model in config.model_keys())
        with key_stays_here(config):
            init_ray(optimizations=cluster.optimizations)
            running = start_environment(environment, config.env.get(name, {}), cluster, resources)
        model = start_model(config, tokenizer, resources)
        runner = RolloutRunner(
            model,
            {name: running},
            tokenizer,
            limits_of(config),
            loop,
            text_rules(config.data),
            cluster.optimizations,
            endpoint=cluster.agent_endpoint,
        )
        yield Sampler(runner, sampling_of(config, tokenizer), model if isinstance(model, ChatModel) else None)
