"""Ask generated questions of Reasoning Gym, each of which gets one answer that the library scores."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl.config.schema.kits import ReasoningGymConfig
from nemo_rl.data.messages.content import content_text, texts_between
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart
from nemo_rl.kits.adapters.packages import library
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

reasoning_gym = library("reasoning_gym", "reasoning-gym")

_ADVICE = "Write the answer between <answer> and </answer>."


class ReasoningGymEnvironment(EnvironmentInterface[dict[str, Any]]):
    """The environment `reasoning_gym`, with the library's score from 0 to 1 as the reward.

    The seed of the row determines the question, so the metadata holds only this seed.

    Args:
        cfg: `env.reasoning_gym`.

    Raises:
        ConfigError: there is no such task, or the settings do not fit it.
    """

    config_class: ClassVar[type | None] = ReasoningGymConfig
    gives_answers: ClassVar[bool] = True

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._config = ReasoningGymConfig.build(**cfg)
        self._task(0)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the section by making the task once (`EnvironmentInterface.check_section`)."""
        cls(section)

    def open_episode(self, metadata: dict[str, Any]) -> EpisodeStart[dict[str, Any]]:
        """Return the question for the seed of the row."""
        _, entry = self._task(metadata["seed"])
        return EpisodeStart(metadata, {"role": "user", "content": f"{entry['question']}\n{_ADVICE}"})

    def step(
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Score the text in the last `<answer>...</answer>` of each of B responses. Responses without one get 0."""
        answers = [self._answer(log) for log in message_log_batch]
        scores = [self._score(answer, item["seed"]) for answer, item in zip(answers, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"score: {score:g}"} for score in scores],
            metadata=[{**item, "answered": answer is not None} for item, answer in zip(metadata, answers, strict=True)],
            next_stop_strings=[None] * len(scores),
            rewards=torch.tensor(scores),
            terminateds=torch.ones(len(scores), dtype=torch.bool),
            answers=answers if return_extracted_answer else None,
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Compute `score`, the mean reward, and `answered`, the share of samples with an answer between the tags."""
        answered = [bool(state.get("answered")) for state in batch["extra_env_info"]]
        return batch, {"score": batch["total_reward"].mean().item(), "answered": sum(answered) / len(answered)}

    @staticmethod
    def _answer(log: "LLMMessageLogType") -> str | None:
        found = texts_between(content_text(log[-1]["content"]), "<answer>", "</answer>")
        return found[-1].strip() if found else None

    def _score(self, answer: str | None, seed: int) -> float:
        if answer is None:
            return 0.0
        dataset, entry = self._task(seed)
        return float(dataset.score_answer(answer, entry))

    def _task(self, seed: int) -> tuple[Any, dict[str, Any]]:
        config = self._config
        try:
            dataset = reasoning_gym.create_dataset(config.dataset, seed=seed, size=1, **config.kwargs)
            return dataset, dataset[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"env.reasoning_gym.dataset={config.dataset!r} with kwargs={config.kwargs} cannot be made: {error}"
            ) from None
