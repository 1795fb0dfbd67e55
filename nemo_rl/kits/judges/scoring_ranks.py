"""Run a reward model in its own ranks, which are policy workers without an optimizer.

Invariant: a score equals the one that the same workers give when they train and validate reward models. If the ranks
die or hang during a call, they are replaced once, and the call is repeated. A second failure raises an error.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.interfaces import Message, TaskDataSpec, TokenizerType
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.conversations import get_formatted_message_log
from nemo_rl.data.messages.encoding import encode_text, render_chat, with_bos
from nemo_rl.data.messages.observations import template_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.host.boundary import Boundary
from nemo_rl.kits.judges.places import places_of
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import DataError, DeadlineExceededError, WorkerDiedError

_SPEC = TaskDataSpec("reward_model", text_rules=TextRules(rows=True, tools=True))


@dataclass(frozen=True)
class ConversationTokens:
    """Tokenises conversations with the chat template of a reward model."""

    tokenizer: TokenizerType
    """Tokenizer of the reward model."""
    longest: int
    """Largest number of tokens that the model reads."""
    too_long: Literal["error", "keep_end"] = "error"
    """Treatment of a longer conversation: "error" makes it an error, and "keep_end" scores only its last tokens."""
    ends_with_turn: bool = True
    """Whether text that the template writes after the last turn is left out, as it is in training."""

    def of(self, messages: Sequence[Message]) -> Tensor:
        """Return the tokens of a conversation, [T] int64.

        The role "environment" is rendered as "user".

        Args:
            messages: messages with `role` and `content`, of which the last one is the answer.

        Raises:
            DataError: the conversation is too long, the template refuses it, or a part is not text.
        """
        known = [template_message(message) for message in messages]
        ids = self._as_trained(known) if self.ends_with_turn else self._as_rendered(known)
        if len(ids) <= self.longest:
            return ids
        if self.too_long == "keep_end":
            return ids[-self.longest :]
        raise DataError(
            f"the conversation has {len(ids)} tokens for the reward model, which reads {self.longest}. Raise "
            "env.reward_model.max_model_len, or set env.reward_model.too_long=keep_end"
        )

    def _as_trained(self, messages: list[Message]) -> Tensor:
        log = get_formatted_message_log(messages, self.tokenizer, _SPEC, add_generation_prompt=True)
        return torch.cat([message["token_ids"] for message in log])

    def _as_rendered(self, messages: list[Message]) -> Tensor:
        quoted = control_tokens_of(self.tokenizer).quoted_chat(messages, _SPEC.rules)
        text = render_chat(quoted, self.tokenizer, add_generation_prompt=False)
        return encode_text(with_bos(text, self.tokenizer), self.tokenizer)


def padded(rows: Sequence[Tensor], pad_token_id: int) -> BatchedDataDict[Any]:
    """Pad B rows of tokens on the right, and return `input_ids` [B, T] and `input_lengths` [B], both int64."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_token_id)
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows])})


@dataclass(frozen=True)
class StepRow:
    """An answer whose steps are scored."""

    token_ids: Tensor
    """[T] int64."""
    ends: Tensor
    """[steps] int64, index of the token after each step."""


@dataclass(eq=False)
class _WaitingRow[RowT, ScoreT]:
    row: RowT
    score: "asyncio.Future[ScoreT]"


class JoinedPasses[RowT, ScoreT]:
    """Score rows in common forward passes.

    Args:
        scores: function that computes the score, or the scores, of each row, called by one thread at a time.
        wait_s: time in seconds that a row waits for further rows.
        largest: largest number of rows of a pass.
    """

    def __init__(self, scores: Callable[[Sequence[RowT]], list[ScoreT]], wait_s: float, largest: int) -> None:
        self._scores = scores
        self._wait_s = wait_s
        self._largest = largest
        self._waiting: list[_WaitingRow[RowT, ScoreT]] = []
        self._worker: asyncio.Task[None] | None = None
        self.num_passes = 0
        """Number of calls of `scores`."""
        self.num_rows = 0
        """Number of rows that these calls scored."""

    async def score(self, row: RowT) -> ScoreT:
        """Return what `scores` computes for a row.

        Raises:
            Exception: the error of `scores` for this row alone.
        """
        waiting: _WaitingRow[RowT, ScoreT] = _WaitingRow(row, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.score

    async def _work(self) -> None:
        """Make passes until no row waits."""
        await asyncio.sleep(self._wait_s)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._largest], self._waiting[self._largest :]
            wanted = [waiting for waiting in batch if not waiting.score.done()]
            if wanted:
                await self._pass(wanted)

    async def _pass(self, batch: list[_WaitingRow[RowT, ScoreT]]) -> None:
        """Score rows together, or one by one if scoring them together fails."""
        self.num_passes += 1
        self.num_rows += len(batch)
        with Boundary(Exception) as caught:  # the sample of each row gets the error of that row
            scores = await asyncio.to_thread(self._scores, [waiting.row for waiting in batch])
        if caught:
            if len(batch) > 1:
                for waiting in batch:
                    await self._pass([waiting])
            elif not batch[0].score.done():
                batch[0].score.set_exception(caught.take())
            return
        for waiting, score in zip(batch, scores, strict=True):
            if not waiting.score.done():
                waiting.score.set_result(score)


logger = logging.getLogger(__name__)


class ScoringRanks:
    """The processes of a reward model.

    Args:
        config: the section `env.reward_model`.
        num_scores: number of outputs of the model's head.

    Raises:
        ConfigError: the section, the model or the number of ranks cannot be used.
        ResourceInsufficientError, DeadlineExceededError, WorkerDiedError: the ranks did not start.
    """

    def __init__(self, config: RewardModelEnvironmentConfig, tokenizer: TokenizerType, num_scores: int = 1) -> None:
        self._pad_token_id = tokenizer.pad_token_id
        self._places = places_of("reward_model", config.resources, on_gpus=config.uses_gpu)
        with ExitStack() as undo:
            undo.callback(self._places.shutdown)
            self._policy = Policy(
                self._places,
                config.as_policy(num_scores),
                tokenizer,
                # The ranks of an environment that is being replaced may still use their names.
                name_prefix=f"reward_model-{uuid.uuid4().hex[:8]}",
                init_optimizer=False,
                init_reference_model=False,
            )
            undo.pop_all()

    def scores(self, rows: Sequence[Tensor]) -> list[float]:
        """Return the score after the last token of B rows of tokens, each [T] int64.

        Raises:
            WorkerDiedError, DeadlineExceededError: the ranks died or hung twice.
        """
        scores: list[float] = self._called(padded(rows, self._pad_token_id), self._policy.score)["scores"].tolist()
        return scores

    def attribute_scores(self, rows: Sequence[Tensor]) -> list[list[float]]:
        """Return all scores after the last token of B rows (`scores`), for a head with several outputs."""
        scores = self._called(padded(rows, self._pad_token_id), self._policy.score)["scores"]
        return [list(each) for each in scores.reshape(len(rows), -1).tolist()]

    def step_scores(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Return the score of each step of B answers. Errors are those of `scores`."""
        batch = padded([row.token_ids for row in rows], self._pad_token_id)
        values_BT = self._called(batch, self._policy.get_values)["values"]
        return [values_T[row.ends].tolist() for row, values_T in zip(rows, values_BT, strict=True)]

    def _called(self, batch: BatchedDataDict[Any], method: Callable[[Any], Any]) -> Any:
        """Call a method of the policy. If the ranks die or hang, replace them, and call it again."""
        try:
            return method(batch)
        except (WorkerDiedError, DeadlineExceededError, *WORKER_DEATHS) as error:
            reason = self._policy.find_loss(silence_is_loss=True) or str(error)
            logger.warning("The ranks of the reward model are replaced: %s", reason)
        self._policy.restart()
        return method(batch)

    def shutdown(self) -> None:
        """Stop the ranks and release their CPUs or GPUs."""
        self._policy.shutdown()
        self._places.shutdown()
