"""Send single requests to an OpenAI-compatible endpoint, and describe their errors.

Invariants: a request ends within its time limit with a JSON object or an `EndpointError`. At most `largest_bytes` of a
response are read. No error contains the key.
"""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.utils.addresses import read_at_most
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 300
_TRANSIENT = frozenset((408, 409, 425, 429))
"""Status codes below 500 after which the same request may succeed."""
_LONGEST_WAIT_S = 3600.0


class EndpointError(Exception):
    """Error of a request without a usable answer.

    Args:
        may_pass: Whether the same request may succeed later.
        wait_s: Seconds to wait, as requested by the endpoint.
        status: Status code of the response. None if there was no response, or if it was 200.
    """

    def __init__(self, reason: str, *, may_pass: bool = True, wait_s: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason)
        self.may_pass = may_pass
        self.wait_s = wait_s
        self.status = status


@dataclass(eq=False)
class EndpointConnection:
    """Connections to an endpoint, for one event loop."""

    name: str
    """Name of the endpoint in errors, such as "the judge"."""
    base_url: str
    """Base address of the endpoint, including the version."""
    key: str | None
    """Key that is sent with each request. If None, no key is sent."""
    timeout_s: float
    """Time limit of a request in seconds."""
    timeout_key: str
    """Configuration key that sets `timeout_s`."""
    max_connections: int
    """Largest number of concurrent connections."""
    largest_bytes: int
    """Largest number of bytes of a response. A longer response is refused."""
    _client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=self.max_connections)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, follow_redirects=False)

    async def ask(self, method: Literal["GET", "POST"], path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request.

        Args:
            path: Path below the address.
            body: Body that is sent as JSON. If None, no body is sent.

        Returns:
            The decoded JSON of the response.

        Raises:
            EndpointError: The endpoint cannot be reached, takes too long, refuses the request, or answers without JSON.
        """
        url = f"{self.base_url.rstrip('/')}/{path}"
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._ask(method, url, body)
        except TimeoutError:
            limit = f"{self.timeout_s:g} s ({self.timeout_key})"
            raise EndpointError(f"{self.name} at {url} gave no answer in {limit}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise EndpointError(self.safe(f"{self.name} at {url} cannot be reached: {reason}")) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def safe(self, text: str) -> str:
        """Return a text without the key, which an endpoint may repeat in its answers."""
        return text.replace(self.key, "***") if self.key else text

    async def _ask(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        async with self._client.stream(method, url, json=body) as response:
            content = await read_at_most(response, self.largest_bytes)
        if content is None:
            raise EndpointError(f"{self.name} at {url} sent more than {self.largest_bytes} bytes")
        # # The key is removed first, because a cut text could end with an unrecognised part of the key.
        shown = printable(self.safe(content[: 2**16].decode(errors="replace")))[:_SHOWN_CHARS]
        status = response.status_code
        if status != httpx.codes.OK:
            raise EndpointError(
                f"{self.name} at {url} answered with status {status}: {shown}",
                may_pass=status >= 500 or status in _TRANSIENT,
                wait_s=seconds_of(response.headers.get("retry-after")),
                status=status,
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            wanted = "JSON" if body is None else "chat completion"
            raise EndpointError(f"{self.name} at {url} sent no {wanted}: {shown}") from None


def printable(text: str) -> str:
    """Return a text in which characters that a terminal cannot show, such as those of binary data, are escaped."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def seconds_of(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header (a number or a date), at most an hour. Return 0 if it is invalid."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT_S) if seconds == seconds else 0.0  # NaN


def pause_s(attempt: int, first_s: float, longest_s: float, error_wait_s: float) -> float:
    """Return the seconds to wait before a request is sent again, doubled with each attempt, with jitter.

    Args:
        attempt: Number of repetitions so far.
        first_s: Seconds before the first repetition.
        longest_s: Largest number of seconds, unless the endpoint requests more.
        error_wait_s: `EndpointError.wait_s`, which is used if it is longer.
    """
    doubled = min(first_s * 2.0 ** min(attempt, 64), longest_s)
    return max(doubled * random.uniform(0.5, 1.0), error_wait_s)


async def ask_again[Answer](
    ask: Callable[[], Awaitable[Answer]], config: ModelEndpointConfig, note_repetition: Callable[[], None]
) -> Answer:
    """Call a function until it gives an answer, with growing pauses.

    Args:
        ask: Function that sends one request.
        note_repetition: Function that is called before each pause.

    Raises:
        EndpointError: The request would fail again, or failed `max_attempts` times, which the text then says.
    """
    attempt = 0
    while True:
        try:
            return await ask()
        except EndpointError as error:
            attempt += 1
            if not error.may_pass:
                raise
            if attempt >= config.max_attempts:
                raise EndpointError(f"{error} (attempt {attempt} of {config.max_attempts})") from None
            wait_s = pause_s(attempt - 1, config.backoff_s, config.max_backoff_s, error.wait_s)
            logger.debug("Attempt %d: %s; the next one follows in %.1f s.", attempt, error, wait_s)
        note_repetition()
        await asyncio.sleep(wait_s)


def key_of(variable: str | None, key: str, user: str) -> str | None:
    """Return the key of an endpoint from an environment variable. Return None if no variable is configured.

    Args:
        key: Configuration key that contains the name.
        user: Name of the part that reads the variable, such as "the environment", for the error.

    Raises:
        ConfigError: The variable is not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(
            f"{key}={variable}, but this environment variable is not set where {user} runs. Export it before the run "
            f"(on a cluster, before Ray starts), or set {key}=null."
        )
    return value
