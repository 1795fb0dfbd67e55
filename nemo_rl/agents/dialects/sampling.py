"""Read the fields that say how an answer is sampled; all dialects share them.

Other fields are ignored: those of accounting ("user", "metadata", "store", "service_tier", "cache_control" ...) and
those that only advise a model ("reasoning_effort", "verbosity", "thinking").
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.answer_forms import FormPlaces, answer_form
from nemo_rl.agents.dialects.fields import Fields

MOST_ANSWERS = 128
"""Largest number of answers of one request, as OpenAI has it."""

_MOST_TOKENS = 2**31 - 1
_HIGHEST_TEMPERATURE = 2.0
_SMALLEST_TOP_P = 1e-6
_ALL_TOKENS = -1
"""Value of `CallRequest.top_k`. Programs write 0 for it too."""
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
"""Fields of OpenAI's APIs and of vLLM's extensions, and the values that have no effect."""

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
"""Arguments of the function that applies a chat template; they are no variables of the template."""


def sampling_fields(
    fields: Fields, length_fields: Sequence[str], stop_field: str = "stop", own_forms: FormPlaces = ()
) -> dict[str, Any]:
    """Return the attributes of a `CallRequest` that say how to sample, by name.

    Args:
        fields: the request.
        length_fields: names of the field for the largest number of tokens; the first one that is given counts.
        stop_field: name of the field for texts that end the answer.
        own_forms: see `answer_form`.

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
    # The best of so many answers are all of them.
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
