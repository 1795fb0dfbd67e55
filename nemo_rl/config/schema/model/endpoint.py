"""Define the keys of a model on another server."""

from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Count, HttpAddress, Seconds

_PATH = "/chat/completions"
_OURS = ("messages", "model", "n", "stream")


def _variable_name(name: str) -> str:
    if not (name.isascii() and name.isidentifier()):
        # # The message does not repeat the text, because it may be the key itself.
        raise PydanticCustomError(
            "api_key_env", "it is no name of an environment variable. Export the key in a variable and give its name"
        )
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]


class ModelEndpointConfig(Section):
    """The model of an OpenAI-compatible endpoint, which is evaluated instead of one on engines of the run."""

    base_url: HttpAddress
    """Address of the endpoint including the version, for example http://127.0.0.1:8000/v1."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the endpoint."""
    api_key_env: VariableName | None = None
    """Environment variable with the key, which is never logged or stored; null: no key is sent."""
    max_concurrent_requests: Count = 64
    """Number of concurrent requests."""
    timeout_s: Seconds = 600.0
    """Time limit of one request in seconds."""
    max_attempts: Count = 6
    """Largest number of requests for one answer. A request is repeated if the endpoint cannot be reached, is overloaded
    or fails. After the last request, the sample gets an error."""
    backoff_s: Seconds = 1.0
    """Seconds before the second request, doubled for each further request unless the endpoint requests more."""
    max_backoff_s: Seconds = 60.0
    """Longest wait between two requests in seconds, unless the endpoint requests more."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of each request. They replace fields that generation sets. A field that is null is left out."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if urlsplit(self.base_url).path.rstrip("/").endswith(_PATH):
            raise PydanticCustomError("base_url", "base_url ends with {path}; leave that out", {"path": _PATH})
        if ours := [name for name in _OURS if name in self.extra_body]:
            raise PydanticCustomError(
                "extra_body", "extra_body has {names}, which the evaluation sets; remove it", {"names": ", ".join(ours)}
            )
        return self
