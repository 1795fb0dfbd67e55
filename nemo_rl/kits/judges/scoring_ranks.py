"""Run a reward model in ranks of its own: the policy's workers, without an optimizer.

Invariant: a score is the one that the same workers give in the training and validation of reward models. Ranks that
died or hang are replaced once for a call; the call that fails again raises.
"""

import logging
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.kits.judges.conversation_tokens import padded
from nemo_rl.kits.judges.places import places_of
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

logger = logging.getLogger(__name__)


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
        self._places = places_of("reward_model", config.resources, on_gpus=config.uses_gpu)
        with ExitStack() as undo:
            undo.callback(self._places.shutdown)
            self._policy = Policy(
                self._places,
                config.as_policy(),
                tokenizer,
                # Ranks of an environment that is being replaced may still hold their names.
                name_prefix=f"reward_model-{uuid.uuid4().hex[:8]}",
                init_optimizer=False,
                init_reference_model=False,
            )
            undo.pop_all()

    def scores(self, rows: Sequence[Tensor]) -> list[float]:
        """Score B rows of tokens, each [T] int64.

        Raises:
            WorkerDiedError, DeadlineExceededError: the ranks died or hung twice.
        """
        batch = padded(rows, self._pad_token_id)
        try:
            return self._scores(batch)
        except (WorkerDiedError, DeadlineExceededError, *WORKER_DEATHS) as error:
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
