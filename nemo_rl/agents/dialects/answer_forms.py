"""Read the form that a request demands of its answer, in the words of several APIs.

OpenAI's `response_format`, and `text.format` of its Responses API; Anthropic's `output_config.format`, and the older
`output_format` of its beta; vLLM's `structured_outputs`, and its older `guided_*`. The engine decides whether a schema,
an expression or a grammar is valid, before it draws a token.
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
"""Objects of a request, None for one that is left out, and the name of their field with the form."""


def answer_form(fields: Fields, own: FormPlaces = ()) -> Grammar | None:
    """Return the form of the answer to a request; None if it may have any.

    Args:
        fields: the request.
        own: places of the form in this API, besides `response_format`.

    Raises:
        CallError: a field is wrong, or there are several forms.
    """
    found = dict(_forms(fields, own))
    if len(found) > 1:
        first, second, *_ = found
        raise fields.unsupported(first, f"It is given together with {second}; give one of them.")
    return next(iter(found.values()), None)


def _forms(fields: Fields, own: FormPlaces) -> Iterator[tuple[str, Grammar]]:
    """Yield the names of fields with a form, and the forms."""
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
    """Read `{"type": "json_schema", "schema": ...}`; Chat Completions nests the schema and its name once more."""
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
