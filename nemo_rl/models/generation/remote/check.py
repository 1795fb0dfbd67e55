"""Ask an endpoint, before a run starts, whether it can be reached and has the model."""

import logging
from typing import Any

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError
from nemo_rl.models.generation.remote.model import SECTION, connection_to
from nemo_rl.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

_CHECK_S = 30.0
_MOST_SHOWN = 20
_WITHOUT_LIST = frozenset((404, 405, 501))
"""Status codes of servers that do not list their models."""
_NO_MODEL = (
    "model_not_found",
    "model not found",
    "not a valid model",
    "unknown model",
    "invalid model",
    "does not exist",
)
"""Parts of error texts by which servers report that they do not have a model."""


async def check_endpoint(config: ModelEndpointConfig) -> None:
    """Ask for the list of models. If the model is not in the list, ask the model for one token.

    Raises:
        ConfigError: the endpoint cannot be reached, refuses the key, or does not have the model.
    """
    connection = connection_to(config, min(config.timeout_s, _CHECK_S))
    try:
        names = await _names(config, connection)
        if names is not None and config.model in names:
            return
        try:
            await connection.ask("POST", "chat/completions", _shortest(config))
        except EndpointError as error:
            if error.may_pass:
                logger.warning("%s; the evaluation starts nevertheless.", error)
                return
            if error.status in (400, 422) and not _is_about_model(error):
                return  # the request was refused, for example its `max_tokens`
            raise ConfigError(_unusable(config, error) if names is None else _missing(config, names, error)) from None
        if names is not None:
            logger.warning("%s does not list %r, but has it.", config.base_url, config.model)
    finally:
        await connection.close()


async def _names(config: ModelEndpointConfig, connection: EndpointConnection) -> list[str] | None:
    """Return the models of an endpoint, or None if it does not list them."""
    try:
        listed = await connection.ask("GET", "models")
    except EndpointError as error:
        if error.status in (401, 403):
            key = f"the key in {config.api_key_env}" if config.api_key_env else "requests without a key"
            raise ConfigError(
                f"{error}\nIt refuses {key}. Export a key in an environment variable and name the variable in "
                f"{SECTION}.api_key_env."
            ) from None
        if error.status in _WITHOUT_LIST:
            logger.warning("%s has no list of models, so %r is asked for one token.", config.base_url, config.model)
            return None
        if error.status is not None and error.may_pass:
            logger.warning("%s; %r is asked for one token instead.", error, config.model)
            return None
        raise ConfigError(
            f"{error}\nStart the server, or correct {SECTION}.base_url={config.base_url}: it ends before /models, "
            "usually with /v1."
        ) from None
    return _listed(listed)


def _listed(listed: Any) -> list[str] | None:
    """Return the names in a list in OpenAI's form. Return None for other forms."""
    try:
        return [str(each["id"]) for each in listed["data"]]
    except (TypeError, LookupError):
        return None


def _shortest(config: ModelEndpointConfig) -> dict[str, Any]:
    return {"model": config.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def _is_about_model(error: EndpointError) -> bool:
    """Return whether the server's error text says that the model does not exist."""
    text = str(error).lower()
    return any(words in text for words in _NO_MODEL)


def _unusable(config: ModelEndpointConfig, error: EndpointError) -> str:
    return (
        f"{error}\nThe endpoint lists no models, and does not answer as {SECTION}.model={config.model!r} either. "
        f"Correct {SECTION}.base_url={config.base_url}: it ends before /chat/completions, usually with /v1. If it is "
        f"right, check {SECTION}.model and api_key_env."
    )


def _missing(config: ModelEndpointConfig, names: list[str], error: EndpointError) -> str:
    shown = ", ".join(names[:_MOST_SHOWN]) + (f" and {len(names) - _MOST_SHOWN} more" if names[_MOST_SHOWN:] else "")
    return (
        f"{SECTION}.model={config.model!r} is not among the models of {config.base_url}: {shown or 'it has none'}."
        f"{did_you_mean(config.model, names)} Asked for it, {error}"
    )
