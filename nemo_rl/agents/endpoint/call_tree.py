"""Store the calls of one sample as a tree, in which a call that continues an earlier answer is a child of that call.

    root: [system, user] ─► answer a ─┬─ [..., a, tool] ─► answer b      the history of b continues a
                                      └─ [..., a, user] ─► answer c      and so does that of c
    root: [summary, user] ─► answer d                                    another history: another tree

Histories are looked up by a digest of their messages, tools and template variables. Invariant: the tokens of a child
begin with all tokens of its parent, so no sampled token is ever tokenised again.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nemo_rl.agents.endpoint.calls import CallRequest
from nemo_rl.data.images.image import Image
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.template_form import arguments_value
from nemo_rl.experience.trajectory import Ending
from nemo_rl.models.generation.interfaces import ServedBy, VersionSpan

type Digest = bytes


@dataclass(eq=False)
class Call:
    """Answered call."""

    id: str
    """Id of the call within the session."""
    parent: "Call | None"
    """Call whose answer is continued, or None if this call continues none."""
    added: Message
    """Messages before the answer as one message, with the `token_ids` that follow the parent's tokens."""
    answer: Message
    """Message with `content`, `token_ids` and `generation_logprobs`."""
    weight_versions: Sequence[VersionSpan]
    """Versions of the weights that sampled the answer, with the token at which each begins."""
    served_by: ServedBy | None
    """Engine that sampled the answer."""
    is_cut: bool = False
    """Whether a limit cut the answer off, so that it ends without a token that ends a turn."""
    cut_by: Ending | None = None
    """The limit of the run that cut the answer off, or None if no limit or the program's own limit did."""
    num_beginning: int = 0
    """Number of tokens at the end of `added` that are the beginning of the answer, written by the program."""
    added_images: Sequence[Image] = ()
    """Images of `added`, in the order of their tokens."""

    @property
    def images(self) -> list[Image]:
        """All images of the conversation, in the order of their tokens."""
        return [image for call in self.path for image in call.added_images]

    @property
    def path(self) -> "list[Call]":
        """The calls from the root to this one."""
        calls: list[Call] = []
        call: Call | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]

    @property
    def log(self) -> list[Message]:
        """All messages of the conversation, including the answer."""
        return [message for call in self.path for message in (call.added, call.answer)]

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the first prompt, including the header of the first answer."""
        root = self.path[0]
        return int(root.added["token_ids"].numel()) - root.num_beginning

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens of the conversation, including the answer."""
        return [token for message in self.log for token in message["token_ids"].tolist()]


@dataclass(frozen=True)
class History:
    """Part of a request that an earlier call already contains."""

    parent: Call | None = None
    """Call that the request continues, or None if it continues none."""
    num_known: int = 0
    """Number of messages of the request that the parent's tokens already contain."""


@dataclass
class CallTree:
    """Calls of one sample, in the order in which they were answered."""

    calls: list[Call] = field(default_factory=list)
    _by_history: defaultdict[Digest, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls by the digest of their history with the answer. Equal calls are in order, with the newest one last."""
    _plain: list[tuple[Call, str]] = field(default_factory=list)
    """Calls that are plain completions, with the text of prompt and answer."""

    def find(self, request: CallRequest) -> History:
        """Find the call whose messages and answer are the longest prefix of a request, or return an empty `History`."""
        digests = list(_digests(request))
        for known in range(len(request.messages) - 1, 0, -1):
            call = self._call_at(digests[known], request.messages[known - 1])
            if call is not None:
                return History(call, known)
        return History()

    def find_cut(self, request: CallRequest) -> Call | None:
        """Find the call with the cut-off answer that a request repeats as its last message in order to continue it."""
        *_, digest = _digests(request)
        call = self._call_at(digest, request.messages[-1])
        return call if call is not None and call.is_cut else None

    def _call_at(self, digest: Digest, message: Message) -> Call | None:
        """Return the call with a history and an answer. Calls with the same reasoning come first, then newer calls."""
        same = self._by_history.get(digest, [])
        if message["role"] != "assistant" or not same:
            return None
        thought = message.get("reasoning_content")
        thinking = (call for call in reversed(same) if call.answer.get("reasoning_content") == thought)
        return next(thinking, same[-1])

    def find_plain(self, prompt: str | Sequence[int]) -> tuple[Call, str] | None:
        """Find the longest plain completion that is the beginning of a prompt, and return its call and its text."""
        known: tuple[Call, str] | None = None
        for call, text in self._plain:
            ids = call.token_ids
            begins = prompt.startswith(text) if isinstance(prompt, str) else list(prompt[: len(ids)]) == ids
            if begins and (known is None or len(ids) >= len(known[0].token_ids)):
                known = call, text
        return known

    def add(self, call: Call, request: CallRequest, message: Message, plain_text: str = "") -> None:
        """Add an answered call.

        Args:
            message: the answer as the program gets it.
            plain_text: text of prompt and answer of a plain completion, with special tokens.
        """
        self.calls.append(call)
        if request.prompt is not None:
            self._plain.append((call, plain_text))
            return
        if request.continues_last:
            *messages, beginning = request.messages
            request = replace(request, messages=messages)
            message = {**message, "content": str(beginning.get("content") or "") + str(message["content"])}
        *_, history = _digests(request)
        self._by_history[_with_message(history, message)].append(call)

    def leaves(self) -> list[Call]:
        """Return the calls that no other call continues, in the order of the answers."""
        parents = {id(call.parent) for call in self.calls}
        return [call for call in self.calls if id(call) not in parents]


def _digests(request: CallRequest) -> Iterator[Digest]:
    """Yield the digests of the first 0, 1, ... messages of a request."""
    around = {"tools": list(request.tools), "template_kwargs": dict(request.template_kwargs)}
    digest = _hash(_json(around).encode())
    yield digest
    for message in request.messages:
        digest = _with_message(digest, message)
        yield digest


def _with_message(digest: Digest, message: Message) -> Digest:
    return _hash(digest + _json(_identity(message)).encode())


def _identity(message: Message) -> list[Any]:
    """Return the parts of a message that are the same in equal messages.

    Clients may send an answer back without reasoning and outer white space, and with calls in another format. Images
    are the same if their files have the same content.
    """
    said: Any = message.get("content") or ""
    if isinstance(said, list):
        said = [part["image"].digest if part["type"] == "image" else [part["text"]] for part in said]
    elif message["role"] == "assistant":
        said = said.strip()
    calls = [
        [call.get("id"), call["function"]["name"], arguments_value(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], said, calls, message.get("tool_call_id"), message.get("name")]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _hash(data: bytes) -> Digest:
    return hashlib.blake2b(data, digest_size=16).digest()
