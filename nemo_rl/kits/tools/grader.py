"""Let another environment grade the final answer of an episode with tools.

Invariant: the grader is called in the same way as rollouts call an environment, so any environment can grade.
"""

from typing import TYPE_CHECKING, Any

from nemo_rl.config.schema.kits import GraderConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EpisodeStart
from nemo_rl.environments.registry import check_environment, env_class_path
from nemo_rl.environments.workers.loading import load_env_class, own_hooks, step_concurrency

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class Grader:
    """An environment that grades for another environment.

    Args:
        config: name of the environment, and its section.

    Raises:
        ConfigError: there is no such environment, or its section is wrong.
    """

    def __init__(self, config: GraderConfig) -> None:
        env_class, _ = load_env_class(env_class_path(config.name, config.kwargs))
        self._environment: EnvironmentInterface[Any] = env_class(dict(config.kwargs))  # type: ignore[call-arg]
        self._hooks = own_hooks(env_class)
        self.concurrency = step_concurrency(env_class)

    def step(self, message_log: "LLMMessageLogType", metadata: Any) -> Any:
        """Grade one conversation. If `step` is a coroutine function, return the coroutine without awaiting it."""
        texts = [{"role": turn["role"], "content": turn["content"]} for turn in message_log]
        options = {"return_extracted_answer": True} if self._environment.gives_answers else {}
        return self._environment.step([texts], [metadata], **options)

    def open_episode(self, metadata: Any) -> Any:
        """Open the episode of a sample (`EnvironmentInterface.open_episode`)."""
        return self._environment.open_episode(metadata) if "open_episode" in self._hooks else EpisodeStart(metadata)

    def close_episode(self, metadata: Any) -> Any:
        """Close the episode of a sample (`EnvironmentInterface.close_episode`)."""
        return self._environment.close_episode(metadata)

    def post_process(self, batch: "BatchedDataDict[Any]") -> Any:
        """Correct rewards and return metrics (`EnvironmentInterface.global_post_process_and_metrics`)."""
        return self._environment.global_post_process_and_metrics(batch)

    def shutdown(self) -> Any:
        """Release all resources (`EnvironmentInterface.shutdown`)."""
        return self._environment.shutdown()


def check_grader(config: GraderConfig | None, place: str, tokenizer: "TokenizerType | None") -> None:
    """Check the grading environment and its section in the same way as a section below `env`.

    Args:
        config: section of the grader, or None if nothing is graded.
        place: key of the section, for messages.
        tokenizer: as in `EnvironmentInterface.check_section`.

    Raises:
        ConfigError: there is no such environment, or its section is wrong.
    """
    if config is not None:
        check_environment(config.name, config.kwargs, tokenizer, name_key=f"{place}.name", place=f"{place}.kwargs")
