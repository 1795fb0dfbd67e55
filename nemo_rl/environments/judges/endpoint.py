"""One request to an OpenAI-compatible endpoint, and what can go wrong with it.

Invariant: a request ends within its time limit with the judge's text or a `JudgeError`; of a response at most a
megabyte is read; no error and no log line holds the key.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import httpx

from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.environments.judges.interfaces import JudgeError, JudgeModel, JudgeText
from nemo_rl.utils.errors import ConfigError

_LARGEST_RESPONSE = 2**20
_SHOWN_CHARS = 200
_TRANSIENT = frozenset((408, 409, 425, 429))
"""Statuses below 500 after which the same request may succeed."""


class Endpoint(JudgeModel):
    """The chat endpoint of a judge.

    Args:
        config: the section `env.llm_judge`.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """

    def __init__(self, config: LLMJudgeConfig) -> None:
        super().__init__(config)
        assert config.base_url is not None, "a judge without it is on the run's engines"
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._key = _key(config.api_key_env)
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        limits = httpx.Limits(max_connections=config.max_concurrency)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, follow_redirects=False)

    def body(self, prompt: str) -> dict[str, Any]:
        """See `JudgeModel.body`: with the fields of the configuration."""
        return {**super().body(prompt), **self._config.extra_body}

    async def ask(self, body: Mapping[str, Any], attempt: int = 0) -> JudgeText:
        """See `JudgeModel.ask`.

        Raises:
            JudgeError: the endpoint cannot be reached, takes too long, refuses, or answers with something else than a
                chat completion.
        """
        limit_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(body)
        except TimeoutError:
            raise JudgeError(f"the judge at {self._url} gave no answer in {limit_s:g} s (request_timeout_s)") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise JudgeError(self._safe(f"the judge at {self._url} cannot be reached: {reason}")) from None

    async def _ask(self, body: Mapping[str, Any]) -> JudgeText:
        async with self._client.stream("POST", self._url, json=body) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > _LARGEST_RESPONSE:
                    raise JudgeError(f"the judge at {self._url} sent more than {_LARGEST_RESPONSE} bytes")
        shown = self._safe(content[:_SHOWN_CHARS].decode(errors="replace"))
        if response.status_code != httpx.codes.OK:
            raise JudgeError(
                f"the judge at {self._url} answered with status {response.status_code}: {shown}",
                may_pass=response.status_code >= 500 or response.status_code in _TRANSIENT,
                wait_s=_seconds(response.headers.get("retry-after")),
            )
        try:
            return _judge_text(json.loads(content))
        except (ValueError, TypeError, LookupError, RecursionError):
            raise JudgeError(f"the judge at {self._url} sent no chat completion: {shown}") from None

    def _safe(self, text: str) -> str:
        """Return a text without the key, which an endpoint may repeat."""
        return text.replace(self._key, "***") if self._key else text


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"env.llm_judge.api_key_env={variable}, but this environment variable is not set where the environment "
            "runs. Export it before the run (on a cluster, before Ray starts), or set env.llm_judge.api_key_env=null."
        )
    return key


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a header Retry-After; 0 for a date or nonsense."""
    try:
        return min(max(float(retry_after or 0.0), 0.0), 3600.0)
    except ValueError:
        return 0.0


def _judge_text(completion: Any) -> JudgeText:
    """Read a chat completion.

    Raises:
        ValueError, TypeError, LookupError: it is none, or its text is empty.
    """
    text = completion["choices"][0]["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text")
    usage = completion.get("usage") or {}
    return JudgeText(text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
