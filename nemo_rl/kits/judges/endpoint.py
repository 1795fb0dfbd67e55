"""A judge at an OpenAI-compatible endpoint.

Invariant: a request ends within its time limit with the judge's text or a `JudgeError`. At most one megabyte of a
response is read. No error message and no log line contains the key.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.kits.judges.questions import JudgeError, JudgeModel, JudgeText
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError, key_of

_LARGEST_RESPONSE = 2**20
_SHOWN_CHARS = 200


class Endpoint(JudgeModel):
    """Chat endpoint of a judge.

    Args:
        config: the section `env.llm_judge`.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """

    def __init__(self, config: LLMJudgeConfig) -> None:
        super().__init__(config)
        assert config.base_url is not None, "a judge without it is on the run's engines"
        self._connection = EndpointConnection(
            "the judge",
            config.base_url,
            endpoint_key(config),
            config.request_timeout_s,
            "request_timeout_s",
            config.max_concurrency,
            _LARGEST_RESPONSE,
        )

    def body(self, prompt: str) -> dict[str, Any]:
        """Return the fields of a request, including the configured extra fields (`JudgeModel.body`)."""
        return {**super().body(prompt), **self._config.extra_body}

    async def ask(self, body: Mapping[str, Any], attempt: int = 0) -> JudgeText:
        """Ask the judge (`JudgeModel.ask`).

        Raises:
            JudgeError: the endpoint cannot be reached, takes too long, refuses, or answers with something else than a
                chat completion.
        """
        try:
            completion = await self._connection.ask("POST", "chat/completions", body)
        except EndpointError as error:
            raise JudgeError(str(error), may_pass=error.may_pass, wait_s=error.wait_s) from None
        try:
            return _judge_text(completion)
        except (AttributeError, LookupError, TypeError, ValueError):
            shown = self._connection.safe(str(completion))[:_SHOWN_CHARS]
            raise JudgeError(f"the judge at {self._config.base_url} sent no chat completion: {shown}") from None


def endpoint_key(config: LLMJudgeConfig) -> str | None:
    """Return the key of the endpoint, or None if no key is sent.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """
    return key_of(config.api_key_env, "env.llm_judge.api_key_env", "the environment")


def _judge_text(completion: Any) -> JudgeText:
    """Read a chat completion."""
    choice = completion["choices"][0]
    text = choice["message"]["content"]
    is_complete = choice.get("finish_reason") != "length"
    if text is None and not is_complete:
        text = ""  # all tokens were reasoning, which some endpoints send in another field
    if not isinstance(text, str) or (is_complete and not text.strip()):
        raise ValueError("no text")
    usage = completion.get("usage") or {}
    num_prompt, num_written = (int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens"))
    return JudgeText(text, num_prompt, num_written, is_complete)
