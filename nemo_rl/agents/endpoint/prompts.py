"""Build the tokens of a request from the tokens of the call that it continues and the tokens of its new messages."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from nemo_rl.agents.endpoint.call_tree import Call, CallTree
from nemo_rl.agents.endpoint.calls import CallRequest
from nemo_rl.data.images.image import Image
from nemo_rl.data.images.messages import expanded, images_in, inputs_of
from nemo_rl.data.interfaces import Chat, Message, RowInputs, TokenizerType
from nemo_rl.data.messages.content import TextRules, content_text
from nemo_rl.data.messages.encoding import encode_continuation, encode_text, render_chat
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import prompt_entry
from nemo_rl.utils.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """Tokens before an answer."""

    parent: Call | None
    """Call whose tokens come first, or None if the request continues no call."""
    added: Message
    """Message with the `token_ids` that follow the parent's tokens."""
    num_beginning: int = 0
    """Number of tokens at the end that are the beginning of the answer, written by the program."""
    added_images: Sequence[Image] = ()
    """Images of `added`, in the order of their tokens."""

    @property
    def images(self) -> list[Image]:
        """All images of the prompt, in the order of their tokens."""
        return [*(self.parent.images if self.parent is not None else ()), *self.added_images]

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens of the prompt."""
        known = [] if self.parent is None else self.parent.token_ids
        return known + list(self.added["token_ids"].tolist())


@dataclass
class PromptRenderer:
    """Render the requests of one sample."""

    tokenizer: TokenizerType
    """Tokenizer that renders and encodes."""
    text_rules: TextRules
    """Rules for control tokens in texts, as in `RolloutRunner`."""
    longest: int
    """Largest number of tokens of a prompt. Of a longer prompt, only a part is encoded, which is still too long."""
    history: Literal["keep", "template"]
    """How a session treats its history (`SessionSettings.history`)."""
    counts: Counter[str]
    """Counts for metrics.  `unlike_template` is the number of requests whose kept tokens differ from the rendering of
    the whole history by the chat template, and `new_trees` the number of requests for which a new tree was started."""
    _renderers: dict[str, ObservationRenderer] = field(default_factory=dict)
    """Renderers by the variables of the chat template, as JSON."""

    def prompt(self, request: CallRequest, tree: CallTree) -> Prompt:
        """Return the tokens of a request.

        Raises:
            DataError: the messages cannot be rendered, token ids are unknown, or the tokens are not those of the
                images.
        """
        prompt = self._rendered(request, tree)
        inputs = self.inputs_of(prompt)
        if inputs is not None and len(prompt.token_ids) < self.longest:
            inputs.require(torch.tensor(prompt.token_ids))
        return prompt

    def inputs_of(self, prompt: Prompt | Call) -> RowInputs | None:
        """Return the inputs of the model for the images of a conversation, or None if the policy reads text only."""
        return inputs_of(prompt.images, self.tokenizer)

    def _rendered(self, request: CallRequest, tree: CallTree) -> Prompt:
        """Return the tokens of a request. The method raises the errors of `prompt`."""
        if request.prompt is not None:
            return self._plain(request.prompt, tree)
        if not request.continues_last:
            return self._chat(request, tree)
        cut = tree.find_cut(request)
        if cut is not None:
            return Prompt(cut, {"role": "assistant", "content": "", "token_ids": torch.empty(0, dtype=torch.int64)})
        *messages, beginning = request.messages
        prompt = self._chat(replace(request, messages=messages), tree)
        ids = encode_continuation(str(beginning.get("content") or ""), self.tokenizer, self.longest)
        added = {**prompt.added, "token_ids": torch.cat([prompt.added["token_ids"], ids])}
        return replace(prompt, added=added, num_beginning=ids.numel())

    def text(self, token_ids: list[int]) -> str:
        """Decode tokens, including special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _plain(self, prompt: str | Sequence[int], tree: CallTree) -> Prompt:
        """Return the tokens of a plain completion. The method raises the errors of `prompt`."""
        if not isinstance(prompt, str):
            prompt = prompt[: self.longest + 1]  # the rest is too long too
        known = tree.find_plain(prompt)
        parent, text = (None, "") if known is None else known
        if isinstance(prompt, str):
            rest = prompt.removeprefix(text)
            encode = encode_text if parent is None else encode_continuation
            ids = encode(rest, self.tokenizer, self.longest)
            return Prompt(parent, {"role": "user", "content": rest, "token_ids": ids})
        unknown = [token for token in prompt if not 0 <= token < len(self.tokenizer)]
        if unknown:
            raise DataError(f"the token ids {unknown[:5]} are not among the {len(self.tokenizer)} of the tokenizer")
        own = list(prompt[0 if parent is None else len(parent.token_ids) :])
        added = {"role": "user", "content": self.text(own), "token_ids": torch.tensor(own, dtype=torch.int64)}
        return Prompt(parent, added)

    def _chat(self, request: CallRequest, tree: CallTree) -> Prompt:
        history = tree.find(request)
        parent, new = history.parent, _for_template(request.messages[history.num_known :])
        if parent is None or not new:
            return self._first(request)
        last = {"role": new[-1]["role"], "content": "\n".join(content_text(message["content"]) for message in new)}
        observation = {**last, "messages": new}
        ids = self._renderer(request).token_ids(observation, parent.log, parent.prompt_length, self.longest)
        prompt = Prompt(parent, {**last, "token_ids": ids}, added_images=images_in(new))
        if len(prompt.token_ids) >= self.longest or self._is_like_template(prompt, request):
            return prompt
        self.counts["unlike_template"] += 1
        if self.history == "keep":
            return prompt
        self.counts["new_trees"] += 1
        return self._first(request)

    def _is_like_template(self, prompt: Prompt, request: CallRequest) -> bool:
        """Return whether the chat template renders the whole history to the text of the kept tokens."""
        try:
            rendered = render_chat(
                _for_template(request.messages),
                self.tokenizer,
                add_generation_prompt=True,
                tools=_tools(request),
                template_kwargs=request.template_kwargs,
            )
        except DataError:
            return False  # the template refuses a history that can be continued
        kept = self.text(prompt.token_ids)
        if kept == rendered:
            return True
        # Tokenizers may change a text, so texts that differ are compared again after encoding and decoding. An image
        # has one placeholder in the rendered text, and all of its tokens in the kept one.
        (ids,) = expanded([encode_text(rendered, self.tokenizer)], prompt.images, self.tokenizer)
        return kept == self.text(ids.tolist())

    def _first(self, request: CallRequest) -> Prompt:
        """Render a conversation that does not continue a call."""
        chat: Chat = {
            "messages": _for_template(request.messages),
            "tools": _tools(request),
            "template_kwargs": request.template_kwargs,
        }
        entry = prompt_entry(chat, self.tokenizer, self.longest, self.text_rules)
        return Prompt(None, entry, added_images=images_in(request.messages))

    def _renderer(self, request: CallRequest) -> ObservationRenderer:
        key = json.dumps(dict(request.template_kwargs), sort_keys=True, default=repr)
        if key not in self._renderers:
            self._renderers[key] = ObservationRenderer(self.tokenizer, self.text_rules, request.template_kwargs)
        return self._renderers[key]


def _for_template(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a content for each, which chat templates expect."""
    return [{**message, "content": message.get("content") or ""} for message in messages]


def _tools(request: CallRequest) -> list[dict[str, object]] | None:
    return [dict(tool) for tool in request.tools] or None
