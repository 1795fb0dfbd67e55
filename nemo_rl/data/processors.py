"""Convert a row of a data set to a prompt with token ids. `messages.conversations` converts conversations.

A processor is chosen by name (`data.train.processor`) and called for each row when it is needed. Invariant: the token
ids of a prompt are those of the rendered chat, and are made only once. A prompt that is too long becomes a short stub
with `loss_multiplier` 0, and is never trained on.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from nemo_rl.config.base.names import ROW
from nemo_rl.data.images.messages import images_in, images_of, inputs_of, load_images, with_parts
from nemo_rl.data.interfaces import (
    Chat,
    DatumSpec,
    Message,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl.data.messages.content import TextRules, content_text
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.conversations import (
    expand_images,
    feedback_processor,
    finished_datum,
    preference_preprocessor,
    scored_answer_processor,
    sft_processor,
    with_task_prompts,
)
from nemo_rl.data.messages.coverage import RenderedChat
from nemo_rl.data.messages.encoding import encode_text, render_chat, with_bos
from nemo_rl.data.messages.steps import labelled_steps_processor
from nemo_rl.data.messages.template_form import tools_of
from nemo_rl.utils.errors import DataError

__all__ = [
    "PROCESSOR_REGISTRY",
    "episode_data_processor",
    "feedback_processor",
    "get_processor",
    "math_data_processor",
    "math_hf_data_processor",
    "multichoice_qa_processor",
    "nemo_gym_data_processor",
    "preference_preprocessor",
    "prompt_entry",
    "register_processor",
    "sft_processor",
    "vlm_hf_data_processor",
]


def math_hf_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a prompt from a row's `messages`, of which the last one is the answer.

    The log has one user message with the rendered chat, including the generation prompt. `extra_env_info.ground_truth`
    is the text of the answer. The chat offers the row's `tools` (a list of function schemas, or its JSON text), which
    are also in `extra_env_info.tools`.
    """
    *prompt, answer = datum_dict["messages"]
    how = _Rendering(task_data_spec, tokenizer, max_seq_length, idx)
    return _prompt_datum(prompt, {"ground_truth": content_text(answer["content"])}, datum_dict, how)


def math_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a prompt from a row's `problem`, with `ground_truth` from `expected_answer`."""
    problem, answer = _take(datum_dict, "math_data_processor", "problem", "expected_answer")
    how = _Rendering(task_data_spec, tokenizer, max_seq_length, idx)
    return _prompt_datum([{"role": "user", "content": str(problem)}], {"ground_truth": str(answer)}, datum_dict, how)


def episode_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make the start of a prompt to which the environment adds its first message (`open_episode`).

    It begins with the system prompt and the row's `messages`, often none. `extra_env_info` is that of the row.
    """
    how = _Rendering(task_data_spec, tokenizer, max_seq_length, idx)
    return _prompt_datum(list(datum_dict["messages"]), dict(datum_dict["extra_env_info"]), datum_dict, how)


GYM_ROW = "gym_row"
"""Key in `extra_env_info` for a complete row of NeMo Gym."""


def nemo_gym_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a prompt from a row of `NemoGymDataset`, with the messages and tools of the agent's first request.

    `extra_env_info.gym_row` is the unchanged row for the agent.

    Raises:
        DataError: the row is of another data set, or the prompt gets configured texts that the agent would not get.
    """
    _, info = _take(datum_dict, "nemo_gym_data_processor", "messages", "extra_env_info")
    for key in ("prompt_file", "system_prompt_file"):
        if getattr(task_data_spec, key) is not None:
            raise DataError(
                f"{key} cannot be added to rows of NeMo Gym, because their agents make the prompts. Write the text "
                "into responses_create_params.input of the rows."
            )
    how = _Rendering(task_data_spec, tokenizer, max_seq_length, idx)
    return _prompt_datum(list(datum_dict["messages"]), dict(info), datum_dict, how)


def multichoice_qa_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a prompt from `question`, `options` (a list, or a dict by letter) and `answer`.

    The text of the prompt file, which has no placeholder, comes first, followed by the question and the lettered
    options. `ground_truth` is the letter of the answer. An integer in `answer` is the index of an option.
    """
    question, options, answer = _take(datum_dict, "multichoice_qa_processor", "question", "options", "answer")
    if not isinstance(options, Mapping):
        options = {chr(ord("A") + number): text for number, text in enumerate(options)}
    listed = "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)
    text = f"Question: {question}\nOptions:\n{listed}"
    if task_data_spec.prompt is not None:
        text = f"{_literal(task_data_spec)}\n\n{text}"
    letter = list(options)[answer] if isinstance(answer, int) else str(answer)
    info = {"ground_truth": letter}
    if datum_dict.get("subject") is not None:
        info["subject"] = str(datum_dict["subject"])
    spec = TaskDataSpec(
        task_data_spec.task_name,
        None,
        task_data_spec.system_prompt_file,
        text_rules=task_data_spec.text_rules,
        tools=task_data_spec.tools,
        keeps_rows=task_data_spec.keeps_rows,
        image_limits=task_data_spec.image_limits,
    )
    how = _Rendering(spec, tokenizer, max_seq_length, idx)
    return _prompt_datum([{"role": "user", "content": text}], info, datum_dict, how)


def vlm_hf_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerType,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Make a prompt from a row's `messages` with images, of which the last one is the answer.

    Raises:
        DataError: the tokenizer's model does not read images (policy.is_vlm).
    """
    if images_of(tokenizer) is None:
        raise DataError("vlm_hf_data_processor needs a model that reads images: set policy.is_vlm=true")
    return math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)


PROCESSOR_REGISTRY: dict[str, TaskDataProcessFnCallable] = {
    "default": math_hf_data_processor,
    "math_hf_data_processor": math_hf_data_processor,
    "math_data_processor": math_data_processor,
    "episode_data_processor": episode_data_processor,
    "multichoice_qa_processor": multichoice_qa_processor,
    "nemo_gym_data_processor": nemo_gym_data_processor,
    "sft_processor": sft_processor,
    "vlm_hf_data_processor": vlm_hf_data_processor,
}


def register_processor(processor_name: str, processor_function: TaskDataProcessFnCallable) -> None:
    """Register a processor under a name that configurations can use.

    Raises:
        DataError: Another function already has the name.
    """
    known = PROCESSOR_REGISTRY.get(processor_name)
    if known is not None and known is not processor_function:
        raise DataError(f"a processor named {processor_name!r} exists already; choose another name.")
    PROCESSOR_REGISTRY[processor_name] = processor_function


def get_processor(processor_name: str | None) -> TaskDataProcessFnCallable:
    """Return the processor with a name. If it is None, the name is "default".

    Raises:
        DataError: There is no such processor.
    """
    name = processor_name or "default"
    if name not in PROCESSOR_REGISTRY:
        raise DataError(
            f"processor {name!r} is unknown; choose one of {', '.join(sorted(PROCESSOR_REGISTRY))}, "
            "or add yours with nemo_rl.data.processors.register_processor."
        )
    return PROCESSOR_REGISTRY[name]


_COLUMNS: dict[TaskDataProcessFnCallable, tuple[str, ...]] = {
    math_hf_data_processor: (),
    math_data_processor: ("problem", "expected_answer"),
    vlm_hf_data_processor: (),
    multichoice_qa_processor: ("question", "options", "answer", "subject"),
    sft_processor: (),
    preference_preprocessor: (),  # type: ignore[dict-item]
    feedback_processor: (),
    scored_answer_processor: (),
    labelled_steps_processor: (),  # type: ignore[dict-item]
}


def columns_of(processor: Callable[..., Any]) -> frozenset[str] | None:
    """Return the columns that a processor reads besides those of its data set. Return None for a user's processor."""
    made = processor.func if isinstance(processor, partial) else processor
    own = _COLUMNS.get(made)
    return None if own is None else frozenset((*own, "messages", "tools", "task_name"))


class _Rendering(NamedTuple):
    """Arguments for rendering a prompt: specification, tokenizer, length limit, and the row's index."""

    spec: TaskDataSpec
    tokenizer: TokenizerType
    max_seq_length: int | None
    idx: int


def _prompt_datum(prompt: list[Message], info: dict[str, Any], row: dict[str, Any], how: _Rendering) -> DatumSpec:
    offered = [*(tools_of(row) or ()), *(dict(tool) for tool in how.spec.tools)]
    prompt = load_images(prompt, how.tokenizer, how.spec.images)
    images = images_in(prompt)
    messages = with_task_prompts(prompt, how.spec)
    chat = Chat(messages=with_parts(messages, images), tools=offered or None)
    if chat["tools"] is not None:
        info["tools"] = chat["tools"]
    if how.spec.keeps_rows:
        info[ROW] = {key: value for key, value in row.items() if key != "task_name"}
    entry = opening_entry(chat, how.tokenizer, how.max_seq_length, how.spec.rules)
    RenderedChat(messages, chat["tools"], entry["content"], how.tokenizer).check(
        how.spec.may_leave_out, task=how.spec.task_name
    )
    inputs = inputs_of(images, how.tokenizer)
    datum = finished_datum([entry], info, row.get("task_name"), how.max_seq_length, how.idx, inputs)
    if datum["loss_multiplier"]:
        datum["chat"] = chat
    return datum


_NO_MESSAGE_YET: Message = {"role": "user", "content": ""}
"""Message instead of the environment's first message in a prompt without messages, which templates would refuse."""


def opening_entry(
    chat: Chat, tokenizer: TokenizerType, longest: int | None = None, rules: TextRules | None = None
) -> Message:
    """Return the single log message of a prompt whose first message may still be missing."""
    shown: Chat = chat if chat["messages"] else {**chat, "messages": [_NO_MESSAGE_YET]}
    return prompt_entry(shown, tokenizer, longest, rules)


def prompt_entry(
    chat: Chat, tokenizer: TokenizerType, longest: int | None = None, rules: TextRules | None = None
) -> Message:
    """Return the single log message of a prompt, with its rendered chat and the generation prompt.

    Args:
        chat: messages, tools, and variables for the template.
        tokenizer: tokenizer that renders and tokenises.
        longest: argument of `encode_text`.
        rules: rules that choose texts to encode as ordinary text, or None for `TextRules()`.
    """
    control, rules = control_tokens_of(tokenizer), rules or TextRules()
    messages, tools = control.quoted_chat(chat["messages"], rules), control.quoted_tools(chat["tools"], rules)
    variables = chat.get("template_kwargs")
    text = render_chat(messages, tokenizer, add_generation_prompt=True, tools=tools, template_kwargs=variables)
    text = with_bos(text, tokenizer)
    ids = encode_text(text, tokenizer, longest)
    entry = {"role": "user", "content": control.shown(text), "token_ids": ids}
    if longest is None or ids.numel() <= longest:  # a longer text may have been cut before its images
        expand_images([entry], images_in(chat["messages"]), tokenizer)
    return entry


def _take(datum_dict: dict[str, Any], processor: str, *keys: str) -> list[Any]:
    missing = [key for key in keys if key not in datum_dict]
    if missing:
        raise DataError(
            f"{processor} needs the keys {', '.join(keys)}; this row lacks {', '.join(missing)} "
            f"and has {', '.join(datum_dict)}."
        )
    return [datum_dict[key] for key in keys]


def _literal(spec: TaskDataSpec) -> str:
    """Return the text of a prompt file without a placeholder, with single braces instead of doubled ones."""
    assert spec.prompt is not None
    try:
        return spec.prompt.format()
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"prompt_file {spec.prompt_file!r} has single braces; a multiple-choice prompt has no "
            "placeholder (the question is appended), so write every brace twice."
        ) from error
