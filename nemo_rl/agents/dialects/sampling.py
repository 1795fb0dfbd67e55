"""Read the fields of a request that say how an answer is sampled, for all dialects.

Some fields are ignored: fields for accounting ("user", "metadata", "store", "service_tier", "cache_control" ...), and
fields that only advise a model ("reasoning_effort", "verbosity", "thinking").
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.models.generation.interfaces import Grammar, GrammarKind

ANY_OBJECT = Grammar("json", '{"type": "object"}')

_KINDS: Sequence[GrammarKind] = ("json", "regex", "choice", "grammar")
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}


type FormPlaces = Sequence[tuple[Fields | None, str]]
"""Places of a form in a request: an object (None if it is missing), and the name of its field with the form."""


def answer_form(fields: Fields, own: FormPlaces = ()) -> Grammar | None:
    """Return the form that a request demands of its answer (for example a JSON schema), or None if any form is allowed.

    Args:
        own: places of the form in this API, besides `response_format`.

    Raises:
        CallError: a field is wrong, or the request has several forms.
    """
    found = dict(_forms(fields, own))
    if len(found) > 1:
        first, second, *_ = found
        raise fields.unsupported(first, f"It is given together with {second}; give one of them.")
    return next(iter(found.values()), None)


def _forms(fields: Fields, own: FormPlaces) -> Iterator[tuple[str, Grammar]]:
    """Yield the name of each field that has a form, and the form."""
    for holder, name in ((fields, "response_format"), *own):
        form = None if holder is None else _format(holder, name)
        if holder is not None and form is not None:
            yield holder.name_of(name), form
    structured = fields.object("structured_outputs")
    if structured is not None:
        structured.refuse(_UNSUPPORTED)
        for kind in _KINDS:
            if structured.has(kind):
                yield structured.name_of(kind), _grammar(structured, kind, kind)
        if structured.flag("json_object"):
            yield structured.name_of("json_object"), ANY_OBJECT
    for kind in _KINDS:
        if fields.has(f"guided_{kind}"):
            yield f"guided_{kind}", _grammar(fields, f"guided_{kind}", kind)


def _format(fields: Fields, name: str) -> Grammar | None:
    """Read `{"type": "json_schema", "schema": ...}`. In Chat Completions, the schema is in one more object."""
    form = fields.object(name)
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    holder = form.object("json_schema") or form
    schema = holder.json_object("schema")
    if schema is None:
        raise holder.wrong("schema", "an object, a JSON schema")
    return Grammar("json", json.dumps(schema))


def _grammar(fields: Fields, name: str, kind: GrammarKind) -> Grammar:
    if kind == "choice":
        texts = fields.texts(name)
        if not texts:
            raise fields.wrong(name, "a list of at least one text")
        return Grammar(kind, json.dumps(texts))
    if kind == "json" and not isinstance(fields.values[name], str):
        return Grammar(kind, json.dumps(fields.json_object(name)))
    return Grammar(kind, fields.required_text(name))


MOST_ANSWERS = 128
"""Largest number of answers to one request, as at OpenAI."""

_MOST_TOKENS = 2**31 - 1
_HIGHEST_TEMPERATURE = 2.0
_SMALLEST_TOP_P = 1e-6
_ALL_TOKENS = -1
"""Value of `CallRequest.top_k` for all tokens. Programs also write 0."""
_SEEDS = (-(2**63), 2**63 - 1)

UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"], []),
    "moderation": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Unsupported fields of OpenAI's APIs and of vLLM's extensions, with the values that have no effect."""

_TEMPLATE_ARGUMENTS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""Arguments of the function that applies a chat template. They cannot be variables of the template."""


def sampling_fields(
    fields: Fields, length_fields: Sequence[str], stop_field: str = "stop", own_forms: FormPlaces = ()
) -> dict[str, Any]:
    """Return the attributes of a `CallRequest` that say how to sample, by name.

    Args:
        length_fields: names of fields for the largest number of tokens. The first one in the request is used.
        stop_field: name of the field for stop strings.
        own_forms: `own` of `answer_form`.

    Raises:
        CallError: a field is wrong or not supported.
    """
    fields.refuse(UNSUPPORTED)
    fields.flag("stream")
    fields.flag("return_token_ids")
    fields.text("model")
    lengths = [fields.integer(name, 1, _MOST_TOKENS) for name in length_fields]
    top_k = fields.integer("top_k", -1, _MOST_TOKENS)
    if top_k == 0:
        top_k = _ALL_TOKENS
    return {
        "grammar": answer_form(fields, own_forms),
        "max_tokens": next((each for each in lengths if each is not None), None),
        "stop": fields.texts(stop_field),
        "num_answers": _num_answers(fields),
        "seed": fields.integer("seed", *_SEEDS),
        "temperature": fields.number("temperature", 0.0, _HIGHEST_TEMPERATURE),
        "top_p": fields.number("top_p", _SMALLEST_TOP_P, 1.0),
        "top_k": top_k,
        "template_kwargs": _template_kwargs(fields),
    }


def _num_answers(fields: Fields) -> int:
    num_answers = fields.integer("n", 1, MOST_ANSWERS) or 1
    # The request asks for all of the answers that would be sampled, so there is no choice of the best ones.
    fields.refuse({"best_of": (num_answers,)})
    return num_answers


def _template_kwargs(fields: Fields) -> Mapping[str, Any]:
    values = fields.json_object("chat_template_kwargs") or {}
    for name in values:
        if name in _TEMPLATE_ARGUMENTS:
            raise Fields(values, fields.name_of("chat_template_kwargs")).unsupported(
                name, "Give only variables of the chat template, for example enable_thinking."
            )
    return values
