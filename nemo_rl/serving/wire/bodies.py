"""Define the JSON bodies of requests, and read them.

Unknown fields are ignored, because newer clients may send more. Invariant: what a body contains has the declared types,
and numbers are finite.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from nemo_rl.serving.interfaces import RequestError

SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 366 * 86400
"""Limits of the time for which a checkpoint is kept: 1 hour and 10 years."""

Index = Annotated[int, Field(ge=0, le=2**62)]
"""Number of a request, a model or a sampling session."""
Id = Annotated[str, Field(min_length=1, max_length=256)]
"""Id of a session, a model or a request."""
Text = Annotated[str, Field(max_length=4096)]
"""A text for people, or a path."""
Ttl = Annotated[int, Field(ge=SHORTEST_TTL_S, le=LONGEST_TTL_S)] | None
"""Number of seconds after which a checkpoint is deleted, or None to keep it."""
Metadata = Annotated[dict[str, Any], Field(max_length=64)] | None
"""Data of the user about a run or a checkpoint."""


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class CreateSessionBody(Body):
    """Body of create_session."""

    tags: list[Text] = Field(default_factory=list, max_length=256)
    user_metadata: Metadata = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionBody(Body):
    """Body of session_heartbeat."""

    session_id: Id


class FinishBody(Body):
    """Body of the end of a session."""

    reason: dict[str, Any] = Field(default_factory=dict)
    detail: str | None = None


class LoraBody(Body):
    """Form of an adapter."""

    rank: int = 32
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Body):
    """Family of an optimizer."""

    type: str = "adamw"


class CreateModelBody(Body):
    """Body of create_model."""

    session_id: Id
    model_seq_id: Index
    base_model: Text
    user_metadata: Metadata = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = Field(default_factory=OptimizerBody)


class LoadWeightsBody(Body):
    """Body of load_weights, which makes a new model or changes one."""

    model_id: Id | None = None
    seq_id: Index | None = None
    session_id: Id | None = None
    model_seq_id: Index | None = None
    base_model: Text | None = None
    user_metadata: Metadata = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None


class ModelBody(Body):
    """Body of get_info."""

    model_id: Id


class AdamBody(Body):
    """Parameters of an update."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    """Body of optim_step."""

    model_id: Id
    seq_id: Index
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(Body):
    """Body of save_weights."""

    model_id: Id
    seq_id: Index
    path: Text | None = None
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveSamplerBody(Body):
    """Body of save_weights_for_sampler."""

    model_id: Id
    seq_id: Index
    path: Text | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: dict[str, str] | None = None


class SaveExternalBody(Body):
    """Body of save_weights_external."""

    model_id: Id
    seq_id: Index
    path: Text
    ttl_seconds: Ttl = None
    age_encryption_recipients: list[str] | None = None


class CreateSamplerBody(Body):
    """Body of create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Index
    base_model: Text | None = None
    model_path: Text | None = None


class SamplingBody(Body):
    """Parameters of sampling."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | Annotated[list[int], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TensorBody(Body):
    """Matrix of token ids."""

    data: list[int]
    dtype: Literal["int64"]
    shape: list[Annotated[int, Field(ge=0)]] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class PromptBody(Body):
    """Prompt of a sample."""

    chunks: list[dict[str, Any]]


class SampleBody(Body):
    """Body of asample."""

    sampling_session_id: Id | None = None
    seq_id: Index | None = None
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None


class FutureBody(Body):
    """Body of retrieve_future and cancel_future."""

    request_id: Id
    allow_metadata_only: bool = False


class WeightsInfoBody(Body):
    """Body of weights_info."""

    tinker_path: Text = Field(validation_alias=AliasChoices("tinker_path", "path"))


class TtlBody(Body):
    """Body of a change of the time for which a checkpoint is kept."""

    ttl_seconds: Ttl = None


class SearchBody(Body):
    """Body of a search of sessions."""

    session_id: str | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = None
    statuses: list[dict[str, Any]] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: dict[str, Any] | None = None


def read_json(raw: bytes) -> dict[str, Any]:
    """Return the object in a JSON body.

    Raises:
        RequestError: the body is no JSON object.
    """
    try:
        found = json.loads(raw or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is no valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"The body is a JSON {type(found).__name__}; it must be an object.")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def read_body[B: Body](kind: type[B], given: Mapping[str, Any]) -> B:
    """Return the fields of a body.

    Raises:
        RequestError: a field is missing or has a wrong value. The text names the first one.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(f"{place}: {first['msg']}.") from None
