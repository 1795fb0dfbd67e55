"""The events of a streamed response of the Responses API."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.experience.agents.dialects.interface import Event
from nemo_rl.experience.agents.dialects.response_items import Item, empty_item

type Data = Mapping[str, Any]


def stream_events(response: Data) -> Iterator[Event]:
    """Return the events of a complete response, each with its `sequence_number`."""
    for number, data in enumerate(_response_events(response)):
        yield Event({**data, "sequence_number": number}, data["type"])


def _response_events(response: Data) -> Iterator[Data]:
    unfinished: Data = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": {**response, **unfinished}}
    yield {"type": "response.in_progress", "response": {**response, **unfinished}}
    for index, item in enumerate(response["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": empty_item(item)}
        yield from _content_events(item, {"item_id": item["id"], "output_index": index})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _content_events(item: Item, place: Data) -> Iterator[Data]:
    """Return the events for the arguments of a call, or for each part of a content."""
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **place, "arguments": item["arguments"], "name": item["name"]}
        return
    for index, part in enumerate(item["content"]):
        at = {**place, "content_index": index}
        # Only events of an answer's text have this field.
        scores: Data = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        if part["text"]:
            yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **scores}
        yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **scores}
        yield {"type": "response.content_part.done", **at, "part": part}
