r"""Servers with the interfaces of NeMo Gym for one task, a calculator, where NeMo Gym is not installed.

    python calculator_servers.py "+config_paths=[servers.yaml]" +policy_base_url=URL +policy_api_key=KEY \
        +policy_model_name=NAME

It takes the arguments of `ng_run`, and starts a process for each server of the configuration: an agent, a model server
that turns the Responses API into chat completions, and a resources server with the tool and the reward.
"""

import ast
import json
import operator
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import uvicorn
from omegaconf import OmegaConf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

KINDS = ("responses_api_agents", "responses_api_models", "resources_servers")
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

type Body = dict[str, Any]
type Handler = Callable[[Body], Awaitable[Any]]


class Client:
    """Posts JSON to the servers of a configuration, by their names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._client = httpx.AsyncClient(timeout=None)

    async def post(self, server: str, path: str, body: Body) -> httpx.Response:
        """Post to a server of the configuration; a status above 399 is an error."""
        return (await self.answer(server, path, body)).raise_for_status()

    async def answer(self, server: str, path: str, body: Body) -> httpx.Response:
        """Post to a server of the configuration."""
        _, settings = entry_of(self._config, server)
        return await self.send(f"http://{settings['host']}:{settings['port']}{path}", body)

    async def send(self, url: str, body: Body, **headers: str) -> httpx.Response:
        """Post to an address."""
        return await self._client.post(url, json=body, headers=headers)


def entry_of(config: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return kind and settings of a server."""
    for kind in KINDS:
        for settings in (config[name].get(kind) or {}).values() if isinstance(config[name], Mapping) else ():
            return kind, settings
    raise KeyError(name)


def agent(settings: Mapping[str, Any], client: Client) -> dict[str, Handler]:
    """Alternate between the model and its tools, and let the resources server reward the end."""
    model, resources = settings["model_server"]["name"], settings["resources_server"]["name"]

    async def run(row: Body) -> Any:
        await client.post(resources, "/seed_session", row)
        parameters = row["responses_create_params"]
        given, output = parameters["input"], []
        first = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for _ in range(settings.get("max_steps") or 3):
            request = {**parameters, "input": [*first, *output]}
            response = (await client.post(model, "/v1/responses", request)).json()
            output += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for call in calls:
                result = await client.answer(resources, f"/{call['name']}", json_object(call["arguments"]))
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": result.text})
            if not calls:
                break
        return (await client.post(resources, "/verify", {**row, "response": {**response, "output": output}})).json()

    return {"/run": run}


def json_object(text: str) -> Body:
    """Return a JSON object, an empty one where the text is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def model(settings: Mapping[str, Any], client: Client) -> dict[str, Handler]:
    """Answer requests of the Responses API with chat completions of the policy."""

    async def responses(body: Body) -> Any:
        request: Body = {"model": settings["model"], "messages": chat_messages(body["input"])}
        if body.get("tools"):
            request["tools"] = [
                {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
                for tool in body["tools"]
            ]
        names = {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
        request |= {name: body[key] for key, name in names.items() if body.get(key) is not None}
        if settings.get("return_token_id_information"):
            request |= {"logprobs": True, "return_tokens_as_token_ids": True}
        request |= json_object((body.get("metadata") or {}).get("extra_body") or "{}")
        url = f"{settings['base_url']}/chat/completions"
        sent = await client.send(url, request, Authorization=f"Bearer {settings['api_key']}")
        answer = sent.raise_for_status().json()
        items = output_items(answer["choices"][0]["message"])
        return {"id": f"resp_{answer['id']}", "object": "response", "output": items, "usage": answer.get("usage")}

    return {"/v1/responses": responses}


def chat_messages(items: Any) -> list[Body]:
    """Return the messages that items of the Responses API stand for."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Body] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            parts = item["content"]
            text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
            messages.append({"role": item["role"], "content": text})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        messages[-1] |= {name: item[name] for name in TOKENS if name in item}
    return messages


def output_items(message: Body) -> list[Body]:
    """Return the items of an answer; the last one has its tokens."""
    items: list[Body] = []
    if message.get("content") or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": [text]})
    for call in message.get("tool_calls") or []:
        items.append({"type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]})
    items[-1] |= {name: message[name] for name in TOKENS if name in message}
    return items


def calculator(settings: Mapping[str, Any], client: Client) -> dict[str, Handler]:
    """Calculate expressions, and reward an answer whose last number is `expected_answer` of the row."""

    async def seed_session(row: Body) -> Any:
        return {}

    async def calculate(arguments: Body) -> Any:
        try:
            return PlainTextResponse(str(value_of(ast.parse(arguments["expression"], mode="eval").body)))
        except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
            return PlainTextResponse(f"Error: {error}")

    async def verify(row: Body) -> Any:
        output = row["response"]["output"]
        texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        numbers = re.findall(r"-?\d+", texts[-1]) if texts else []
        is_right = bool(numbers) and numbers[-1] == str(row["expected_answer"])
        calls = sum(item["type"] == "function_call" for item in output)
        return {**row, "reward": float(is_right), "calculator_calls": calls}

    return {"/seed_session": seed_session, "/calculator": calculate, "/verify": verify}


def value_of(node: Any) -> int:
    """Return the value of a sum, a difference or a product of integers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only integers with +, - and * can be calculated")


SERVERS = dict(zip(KINDS, (agent, model, calculator), strict=True))


def application(handlers: Mapping[str, Handler]) -> Starlette:
    """Return the application of a server; each handler gets the JSON of a request."""

    def route(path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            found = await handler(await request.json())
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, endpoint, methods=["POST"])

    return Starlette(routes=[route(path, handler) for path, handler in handlers.items()])


def serve(app: Starlette, host: str, port: int) -> None:
    """Serve until the process is ended."""
    uvicorn.run(app, host=host, port=port, log_level="warning")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def configuration(arguments: list[str]) -> Any:
    """Return the merged configuration of the command line, in which each server has an address."""
    given = OmegaConf.from_dotlist([argument.removeprefix("+") for argument in arguments])
    config: Any = OmegaConf.to_container(
        OmegaConf.merge(*map(OmegaConf.load, given.pop("config_paths")), given), resolve=True
    )
    for name in config:
        if isinstance(config[name], Mapping) and set(config[name]) & set(KINDS):
            entry_of(config, name)[1].update(host="127.0.0.1", port=free_port())
    return config


def main(arguments: list[str]) -> None:
    """Start the process of each server, and be the head server."""
    if arguments[0] == "serve":
        config = json.loads(arguments[2])
        kind, settings = entry_of(config, arguments[1])
        serve(application(SERVERS[kind](settings, Client(config))), settings["host"], settings["port"])
        return
    config = configuration(arguments)
    names = [name for name in config if isinstance(config[name], Mapping) and set(config[name]) & set(KINDS)]
    children = [subprocess.Popen([sys.executable, __file__, "serve", name, json.dumps(config)]) for name in names]

    async def shown(request: Request) -> Response:
        return JSONResponse(OmegaConf.to_yaml(OmegaConf.create(config)))

    try:
        head = config["head_server"]
        serve(Starlette(routes=[Route("/global_config_dict_yaml", shown)]), head["host"], head["port"])
    finally:
        for child in children:
            child.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
