"""Run a reward model in ranks of its own: the policy's workers, without an optimizer.

Invariant: a score is the one that the same workers give in the training and validation of reward models. Ranks that
died or hang are replaced once for a call; the call that fails again raises.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from torch import Tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.judges.conversation_tokens import padded
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, WorkerDiedError

logger = logging.getLogger(__name__)

_WEIGHTS = ("policy/weights/model", "weights/model", "model")
"""Folders of a checkpoint that hold the sequence classifier, relative to a step, a model and its weights."""


class ScoringRanks:
    """The processes of a reward model.

    Args:
        config: the section `env.reward_model`.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: the section, the model or the number of ranks cannot be used.
        ResourceInsufficientError, DeadlineExceededError, WorkerDiedError: the ranks did not start.
    """

    def __init__(self, config: RewardModelEnvironmentConfig, tokenizer: TokenizerType) -> None:
        self._pad_token_id = tokenizer.pad_token_id
        self._places = _places(config)
        try:
            self._policy = Policy(
                self._places,
                model_section(config),
                tokenizer,
                name_prefix="reward_model",
                init_optimizer=False,
                init_reference_model=False,
            )
        except BaseException:
            self._places.shutdown()
            raise

    def scores(self, rows: Sequence[Tensor]) -> list[float]:
        """Score B rows of tokens, each [T] int64.

        Raises:
            WorkerDiedError, DeadlineExceededError: the ranks died or hung twice.
        """
        batch = padded(rows, self._pad_token_id)
        try:
            return self._scores(batch)
        except (WorkerDiedError, DeadlineExceededError, RayActorError) as error:
            reason = self._policy.find_loss(silence_is_loss=True) or str(error)
            logger.warning("The ranks of the reward model are replaced: %s", reason)
        self._policy.restart()
        return self._scores(batch)

    def _scores(self, batch: Any) -> list[float]:
        return [float(score) for score in self._policy.score(batch)["scores"]]

    def shutdown(self) -> None:
        """Stop the ranks and release their places."""
        self._policy.shutdown()
        self._places.shutdown()


def model_section(config: RewardModelEnvironmentConfig) -> PolicyConfig:
    """Return the section of the model's ranks, as that of a policy."""
    model = config.model_name if config.checkpoint_path is None else str(weights_folder(config.checkpoint_path))
    return PolicyConfig.build(
        model_name=model,
        tokenizer=config.tokenizer.model_dump(),
        precision=config.precision,
        max_total_sequence_length=config.max_model_len,
        train_micro_batch_size=config.batch_size,
        hf_config_overrides=config.hf_config_overrides,
        dtensor_cfg=config.dtensor_cfg.model_dump(),
        reward_model_cfg=config.reward_model_cfg.model_dump(),
        optimizer=None,
        generation=None,
    )


def weights_folder(checkpoint_path: str) -> Path:
    """Return the folder of a checkpoint that holds the model as a Hugging Face sequence classifier.

    Args:
        checkpoint_path: a step folder, the folder of its policy or weights, or the folder itself.

    Raises:
        ConfigError: there is none.
    """
    given = Path(checkpoint_path).expanduser()
    for folder in (given, *(given / below for below in _WEIGHTS)):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"env.reward_model.checkpoint_path={checkpoint_path} has no model. It may be a folder step_<N> that run_rm.py "
        "wrote with dtensor_cfg, its policy/weights, or any folder with config.json; a checkpoint of Megatron Core "
        "has to be exported first (examples/converters/convert_megatron_to_hf.py)."
    )


def _places(config: RewardModelEnvironmentConfig) -> RayVirtualCluster:
    """Return the bundles of the ranks: on CPUs processes next to the others, on GPUs devices of their own."""
    on_gpus, resources = config.device == "cuda", config.resources
    per_node = (resources.gpus_per_node or 1) if on_gpus else (resources.ranks_per_node or 1)
    return RayVirtualCluster(
        [per_node] * (resources.num_nodes or 1),
        use_gpus=on_gpus,
        num_gpus_per_node=per_node,
        name="reward_model",
        placement_group_strategy="STRICT_SPREAD",
    )
