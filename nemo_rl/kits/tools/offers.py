"""Check the tools of a run before anything starts, and return what prompts offer.

Invariant: a tool, a parser or a chat template that cannot be used is reported before Ray starts.
"""

import logging
from typing import Any

from nemo_rl.config.schema.tools import ToolEnvironmentConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.kits.tools.parsing.template import choose_parser
from nemo_rl.kits.tools.toolbox import make_toolbox
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def offered_tools(config: ToolEnvironmentConfig, tokenizer: TokenizerType, place: str) -> list[dict[str, Any]]:
    """Return the function schemas of a section's tools.

    Args:
        config: the section.
        tokenizer: tokenizer of the policy.
        place: key of the section, for messages.

    Raises:
        ConfigError: a tool cannot be used, or the parser does not read what the chat template writes.
    """
    try:
        specs = make_toolbox(config).specs
        schemas = [spec.schema for spec in specs.values()]
        parser = choose_parser(config.tool_parser, tokenizer, schemas)[0] if schemas else None
    except ConfigError as error:
        raise ConfigError(str(error) if place in str(error) else f"{place}: {error}") from error
    if parser is not None:
        logger.info("%s: tools %s; calls are read by vLLM's parser %s.", place, ", ".join(specs), parser.name)
    return schemas
