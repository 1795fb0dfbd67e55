"""Score tokens with the model of an endpoint, which returns the log-probabilities of its prompt.

    row ─► POST completions {prompt: ids, echo, logprobs} ─► token_logprobs ─► logprobs [B, T]
             ▲  pause, twice as long each time │ overloaded, unreachable, too slow
             └─────────────────────────────────┘ at most max_attempts

vLLM and SGLang answer such requests. Invariants: each row gets the endpoint's numbers or the call raises. Before a run,
`check` compares the endpoint's tokens with those of the tokenizer, and asks twice.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.config.schema.algorithms.teachers import TeacherEndpointConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError, ask_again, key_of
from nemo_rl.models.generation.remote.model import connection_to
from nemo_rl.utils.errors import ConfigError, EndpointUnusableError

logger = logging.getLogger(__name__)

_USER = "the teacher"
_NUM_COMPARED = 100
"""Number of token ids whose texts are compared."""
_NOTED, _MOST_DIFFERENT = 1e-3, 0.05
"""Differences in nats between two equal requests above which the check warns and refuses."""


class EndpointScores:
    """Score rows with the model of an endpoint.

    Args:
        section: Dotted key of the endpoint's section, for errors.

    Raises:
        ConfigError: The environment variable of the key is not set.
    """

    def __init__(self, config: TeacherEndpointConfig, section: str) -> None:
        self.num_tokens = 0
        """Number of tokens that were sent."""
        self._config = config
        self._section = section
        key_of(config.api_key_env, f"{section}.api_key_env", _USER)

    def get_logprobs(self, rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Score all tokens at temperature 1.

        Args:
            rows: `input_ids [B, T]` right padded, `input_lengths [B]`.

        Returns:
            `logprobs [B, T]` float32; 0 at position 0 and on padding.

        Raises:
            EndpointUnusableError: The endpoint does not score a row after all attempts, or `max_tokens` is reached.
        """
        ids = [row[:length].tolist() for row, length in zip(rows["input_ids"], rows["input_lengths"], strict=True)]
        self._count(sum(map(len, ids)))
        found = asyncio.run(self._scores(ids))
        logprobs_BT = torch.zeros(rows["input_ids"].shape)
        for row, scores in enumerate(found):
            logprobs_BT[row, : len(scores)] = torch.tensor(scores)
        return BatchedDataDict({"logprobs": logprobs_BT})

    def check(self, tokenizer: TokenizerType) -> None:
        """Ask twice for the same tokens, and compare their texts with the tokenizer's.

        Raises:
            ConfigError: The endpoint cannot be used, its tokens are not the tokenizer's, or its answers differ.
        """
        step = -(-len(tokenizer) // _NUM_COMPARED)
        ids = [token for token in range(0, len(tokenizer), step) if token not in tokenizer.all_special_ids]
        try:
            (texts, first), (_, second) = asyncio.run(self._asked_twice(ids))
        except EndpointUnusableError as error:
            raise ConfigError(f"{error}\nCheck base_url, model and api_key_env of {self._section}.") from None
        self._compare_texts(tokenizer, ids, texts)
        difference = max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)
        if difference > _MOST_DIFFERENT:
            raise ConfigError(
                f"{self._section}: two equal requests to {self._config.base_url} gave log-probabilities that differ by "
                f"{difference:.3g} nats. A teacher must give the same numbers: check whether several models share this "
                "address."
            )
        if difference > _NOTED:
            logger.warning("%s: two equal requests differ by %.3g nats.", self._section, difference)

    def _compare_texts(self, tokenizer: TokenizerType, ids: Sequence[int], texts: Sequence[str]) -> None:
        own = [str(tokenizer.decode([token])) for token in ids]
        other = [
            (token, mine, text)
            for token, mine, text in zip(ids, own, texts, strict=True)
            if text
            and mine.strip() != text.strip()
            and "\ufffd" not in mine
            and not text.startswith(("token_id:", "bytes:"))
        ]
        if other:
            token, mine, text = other[0]
            raise ConfigError(
                f"{self._section}: the tokens of model {self._config.model!r} are not the policy's: id {token} is "
                f"{text!r} at the endpoint and {mine!r} here ({len(other)} of {len(ids)} compared ids differ). "
                "Teachers need the policy's vocabulary: choose a model of the same family."
            )

    def _count(self, more: int) -> None:
        self.num_tokens += more
        most = self._config.max_tokens
        if most is not None and self.num_tokens > most:
            raise EndpointUnusableError(
                f"{self._section}.max_tokens={most}: this run would send {self.num_tokens} tokens to "
                f"{self._config.base_url}. Raise it, and start the same command again to continue."
            )

    async def _asked_twice(self, ids: list[int]) -> list[tuple[list[str], list[float]]]:
        connection = self._connection()
        try:
            return [await self._attempts(connection, ids) for _ in range(2)]
        finally:
            await connection.close()

    async def _scores(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Score rows concurrently."""
        connection, slots = self._connection(), asyncio.Semaphore(self._config.max_concurrent_requests)

        async def scored(ids: list[int]) -> list[float]:
            async with slots:
                return (await self._attempts(connection, ids))[1]

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(scored(ids)) for ids in rows]
        except* EndpointUnusableError as failures:
            raise failures.exceptions[0] from None
        finally:
            await connection.close()
        return [task.result() for task in tasks]

    def _connection(self) -> EndpointConnection:
        return connection_to(self._config, section=self._section, user=_USER)

    async def _attempts(self, connection: EndpointConnection, ids: list[int]) -> tuple[list[str], list[float]]:
        model = self._config.model
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 0}

        async def ask() -> tuple[list[str], list[float]]:
            return read_scores(await connection.ask("POST", "completions", body | self._config.extra_body), len(ids))

        try:
            return await ask_again(ask, self._config, lambda: None)
        except EndpointError as error:
            raise EndpointUnusableError(str(error)) from None


def _is_text(token: str) -> bool:
    """Return whether a server or tokenizer shows a token as text, not as an id or as a part of a character."""
    return bool(token) and "\ufffd" not in token and not token.startswith(("token_id:", "bytes:"))


def read_scores(completion: Any, num_tokens: int) -> tuple[list[str], list[float]]:
    """Return the texts and log-probabilities of the tokens of a prompt. The first log-probability is 0.

    Raises:
        EndpointError: The object has no log-probabilities for each token of the prompt. It is not asked for again.
    """
    try:
        found: Mapping[str, Any] = completion["choices"][0]["logprobs"]
        texts, values = list(found["tokens"]), list(found["token_logprobs"])
    except (TypeError, LookupError) as error:
        raise EndpointError(
            f"the teacher's endpoint sent no log-probabilities of its prompt ({type(error).__name__}: {error}); it "
            "must accept `echo` and `logprobs` in requests to /completions, as vLLM and SGLang do",
            may_pass=False,
        ) from None
    if len(values) not in (num_tokens, num_tokens + 1):
        raise EndpointError(
            f"the teacher's endpoint scored {len(values)} tokens in place of {num_tokens}; it must take token ids",
            may_pass=False,
        )
    scores = [0.0, *values[1:num_tokens]]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in scores):
        raise EndpointError("the teacher's endpoint sent a log-probability that is no finite number", may_pass=False)
    return [str(text) for text in texts[:num_tokens]], [float(value) for value in scores]
