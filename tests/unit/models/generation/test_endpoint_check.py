"""Before an evaluation starts, its endpoint is asked, and errors say what to do."""

import asyncio
from typing import Any

import pytest
from chat_server import KEY, ChatServer, echo, endpoint_config
from starlette.responses import JSONResponse

from nemo_rl.models.generation.remote.check import check_endpoint
from nemo_rl.utils.errors import ConfigError


def check(server: ChatServer, **keys: Any) -> None:
    asyncio.run(check_endpoint(endpoint_config(server, **keys)))


def test_a_listed_model_is_not_asked() -> None:
    with ChatServer(echo) as server:
        check(server)
        assert server.bodies == []


def test_a_model_that_is_served_without_being_listed_is_accepted() -> None:
    with ChatServer(echo) as server:
        check(server, model="hidden")
        assert [body["model"] for body in server.bodies] == ["hidden"]


def test_a_wrong_name_is_refused_with_the_names_there_are() -> None:
    refused = JSONResponse({"error": {"message": "The model `tinny` does not exist."}}, 404)
    with ChatServer(echo, [refused]) as server, pytest.raises(ConfigError) as error:
        server.models = ["tiny", "large"]
        check(server, model="tinny")
    assert "generation.endpoint.model='tinny' is not among the models" in str(error.value)
    assert "tiny, large. Did you mean 'tiny'?" in str(error.value)


def test_an_unreachable_endpoint_is_refused() -> None:
    with (
        ChatServer(echo) as server,
        pytest.raises(ConfigError, match=r"Start the server, or correct generation\.endpoint\.base_url=http://127"),
    ):
        check(server, base_url="http://127.0.0.1:9/v1")


def test_a_refused_key_is_named_by_its_variable_and_not_shown(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", KEY)
    with ChatServer(echo) as server, pytest.raises(ConfigError, match="It refuses the key in SECRET") as error:
        server.list_status = 401
        check(server, api_key_env="SECRET")
    assert KEY not in str(error.value)
    with ChatServer(echo) as server, pytest.raises(ConfigError, match="It refuses requests without a key"):
        server.list_status = 403
        check(server)


@pytest.mark.parametrize("status", [404, 429, 503])
def test_an_endpoint_that_cannot_list_its_models_is_accepted(status: int, caplog: Any) -> None:
    with ChatServer(echo) as server:
        server.list_status = status
        check(server)
        assert [body["max_tokens"] for body in server.bodies] == [1]
    assert "is asked for one token" in caplog.text


def test_an_address_without_its_version_is_refused() -> None:
    with (
        ChatServer(echo) as server,
        pytest.raises(ConfigError, match=r"it ends before /chat/completions, usually with /v1"),
    ):
        check(server, base_url=server.url.removesuffix("/v1"))


@pytest.mark.parametrize(
    ("status", "text", "is_accepted"),
    [
        (400, "Unsupported parameter: 'max_tokens' is not supported with this model.", True),
        (422, "temperature is missing", True),
        (400, "code: model_not_found", False),
        (400, "hidden is not a valid model ID", False),
        (404, "no", False),
    ],
)
def test_a_refused_question_is_no_missing_model(status: int, text: str, is_accepted: bool) -> None:
    with ChatServer(echo, [JSONResponse({"error": {"message": text}}, status)]) as server:
        if is_accepted:
            check(server, model="hidden")
            return
        with pytest.raises(ConfigError, match="is not among the models"):
            check(server, model="hidden")
