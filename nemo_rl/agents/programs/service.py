"""Programs that an HTTP service runs, which may be anywhere.

Invariant: a request is cancelled at the deadline of its task; it is sent once (`posting`).
"""

import asyncio
import json

from nemo_rl.agents.programs.interfaces import AgentError, AgentProgram, AgentTask, too_slow
from nemo_rl.agents.programs.posting import TaskPoster, shown
from nemo_rl.agents.programs.results import AgentResult, read_result

_LARGEST_RESPONSE = 2**20


class ServiceProgram(AgentProgram):
    """A service to which each task is posted; it answers when the program has ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._poster = TaskPoster(_LARGEST_RESPONSE)

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`; a service that cannot be reached or refuses for the moment is asked again."""
        try:
            body = json.dumps(task.as_json).encode()
        except (TypeError, ValueError) as error:
            raise AgentError(f"the task cannot be written as JSON: {error}") from None
        try:
            async with asyncio.timeout(task.timeout_s):
                content = await self._poster.post(task, self._url, body)
        except TimeoutError:
            raise too_slow(task) from None
        try:
            return read_result(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the service {self._url} sent no result: {error}: {shown(task, content)}") from None

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._poster.close()
