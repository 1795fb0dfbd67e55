"""Programs that an HTTP service runs, which may be anywhere.

Invariant: a request is cancelled at the deadline of its task; of a response at most a megabyte is read; a request that
the service may have started to serve is not sent again, because the program would run twice.
"""

import asyncio
import json
import logging

import httpx

from nemo_rl.environments.agents.interfaces import AgentError, AgentProgram, AgentTask, too_slow
from nemo_rl.environments.agents.results import AgentResult, read_result

logger = logging.getLogger(__name__)

_LARGEST_RESPONSE = 2**20
_SHOWN_CHARS = 200
_MAX_ATTEMPTS = 4
_BACKOFF_S = 0.5
_REFUSED = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Status codes of a service that has not run the program."""


class _MayPassError(Exception):
    """The same request may succeed later."""


class ServiceProgram(AgentProgram):
    """A service to which each task is posted; it answers when the program has ended.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.AsyncClient | None = None

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`; a service that cannot be reached or refuses for the moment is asked again."""
        try:
            async with asyncio.timeout(task.timeout_s):
                return await self._answered(task, json.dumps(task.as_json).encode())
        except TimeoutError:
            raise too_slow(task) from None
        except (TypeError, ValueError) as error:
            raise AgentError(f"the task cannot be written as JSON: {error}") from None

    async def shutdown(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _answered(self, task: AgentTask, body: bytes) -> AgentResult:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return await self._post(task, body)
            except _MayPassError as error:
                reason = str(error)
            if attempt + 1 < _MAX_ATTEMPTS:
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
        raise AgentError(f"{reason}, {_MAX_ATTEMPTS} times")

    async def _post(self, task: AgentTask, body: bytes) -> AgentResult:
        if self._client is None:  # constructed here, in the event loop that uses it
            # No connection is kept: the service may close it just when the next request is sent.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(timeout=None, limits=limits, follow_redirects=False)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
                content = bytearray()
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > _LARGEST_RESPONSE:
                        raise AgentError(f"the service {self._url} sent more than {_LARGEST_RESPONSE} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _MayPassError(f"the service {self._url} failed: {_reason(error)}") from None
        except httpx.HTTPError as error:
            raise AgentError(f"the service {self._url} failed: {_reason(error)}") from None
        return self._read(task, response.status_code, bytes(content))

    def _read(self, task: AgentTask, status: int, content: bytes) -> AgentResult:
        shown = task.without_key(content.decode(errors="replace"))[:_SHOWN_CHARS]
        if status != httpx.codes.OK:
            kind = _MayPassError if status in _REFUSED else AgentError
            raise kind(f"the service {self._url} answered with status {status}: {shown}")
        try:
            return read_result(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the service {self._url} sent no result: {error}: {shown}") from None


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
