"""The dialects of the endpoint, and the paths that they are served at."""

from collections.abc import Mapping

from nemo_rl.agents.dialects.chat_completions import ChatCompletions
from nemo_rl.agents.dialects.completions import Completions
from nemo_rl.agents.dialects.interface import Dialect
from nemo_rl.agents.dialects.messages import Messages
from nemo_rl.agents.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages())

DIALECT_BY_PATH: Mapping[str, Dialect] = {dialect.path: dialect for dialect in DIALECTS}
"""For each path below the endpoint's address, for example `/v1/messages`, its dialect."""
