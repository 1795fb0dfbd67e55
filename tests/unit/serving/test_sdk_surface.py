"""What the installed client's library can send, against what the service knows: a newer library shows what is new."""

import re
from pathlib import Path

import pytest
from fake_models import FakeModels
from running import config_in
from starlette.routing import Route

from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.serving.http.server import application_of
from nemo_rl.serving.service import Service
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.serving.wire import bodies

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

NOT_SERVED = {
    "/api/v1/auth/apikey/me",
    "/api/v1/billing/usage/checkpoints/current",
    "/api/v1/billing/usage/events",
    "/api/v1/sessions/{session_id}/project",
    "/api/v1/sessions/{session_id}/trace_export",
}
"""Paths about accounts and traces, which get status 404."""
BODIES = {
    "CreateSessionRequest": bodies.CreateSessionBody,
    "CreateModelRequest": bodies.CreateModelBody,
    "LoraConfig": bodies.LoraBody,
    "LoadWeightsRequest": bodies.LoadWeightsBody,
    "OptimStepRequest": bodies.OptimStepBody,
    "AdamParams": bodies.AdamBody,
    "SaveWeightsRequest": bodies.SaveWeightsBody,
    "SaveWeightsForSamplerRequest": bodies.SaveSamplerBody,
    "SaveWeightsExternalRequest": bodies.SaveExternalBody,
    "CreateSamplingSessionRequest": bodies.CreateSamplerBody,
    "SamplingParams": bodies.SamplingBody,
    "SampleRequest": bodies.SampleBody,
}
"""Name of a type of the library -> the body that reads it."""
WITHOUT_EFFECT = {
    "OptimStepRequest.optim_params",  # sent as adam_params or optimizer_params
    "SampleRequest.base_model",  # the client always makes a sampling session
    "SampleRequest.model_path",
    "SampleRequest.record_stability_info",  # for a loss that is refused
}
"""Fields of the library that the service ignores."""


def paths_of_the_library() -> set[str]:
    root = Path(tinker.__file__).parent
    sources = [path.read_text() for path in root.rglob("*.py") if "test" not in path.name and "tests" not in path.parts]
    return {path for source in sources for path in re.findall(r'"(/api/v1/[^"?]*)"', source)}


def test_every_path_of_the_library_is_answered(tmp_path):
    service = Service(FakeModels(), config_in(tmp_path), ["tiny"])
    application = application_of(service, None, KeyBook(), ConnectionGuard())
    routes = [route for route in application.routes if isinstance(route, Route)]
    service.state.release()

    def is_served(path: str) -> bool:
        example = re.sub(r"\{[^}]*\}", "x", path.replace("{checkpoint_id}", "weights/x"))
        return any(route.path_regex.match(example) for route in routes)

    assert {path for path in paths_of_the_library() if not is_served(path)} == NOT_SERVED


def test_every_field_of_the_library_is_read():
    found = set()
    for name, body in BODIES.items():
        known = set(body.model_fields)
        for field in body.model_fields.values():
            choices = field.validation_alias
            known |= set(map(str, getattr(choices, "choices", [choices] if choices else [])))
        theirs = getattr(types, name).model_fields
        found |= {f"{name}.{field}" for field in set(theirs) - known - {"type"}}
    assert found == WITHOUT_EFFECT
