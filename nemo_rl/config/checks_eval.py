"""Checks between keys of an evaluation, and the names of the data sets it knows.

As in checks.py, a check yields one text for each finding and reads nothing but names and the existence of local paths.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config.names import ARITHMETIC, RESPONSE_DATASET_NAMES
from nemo_rl.config.paths import find_path, looks_local

if TYPE_CHECKING:
    from nemo_rl.config.eval import EvalDataConfig, EvalMasterConfig

Findings = Iterator[str]

LOCALES = (
    *("AR-XY", "BN-BD", "DE-DE", "ES-LA", "FR-FR", "HI-IN", "ID-ID"),
    *("IT-IT", "JA-JP", "KO-KR", "PT-BR", "SW-KE", "YO-NG", "ZH-CN"),
)
"""Languages of the translated MMLU, as they stand in names such as mmlu_DE-DE."""

TRANSLATED_MMLU = tuple(f"mmlu_{locale}" for locale in LOCALES)
MULTIPLE_CHOICE_NAMES = ("gpqa", "gpqa_diamond", "mmlu", "mmlu_pro", *TRANSLATED_MMLU)
EVAL_DATASET_NAMES = ("aime2024", "aime2025", "gsm8k", "math", "math500", ARITHMETIC, *MULTIPLE_CHOICE_NAMES)
"""Built-in data sets of evaluations; those of training (`RESPONSE_DATASET_NAMES`) can be used too."""

_FORMAT_SUFFIXES = {"csv": (".csv",), "json": (".json", ".jsonl", ".ndjson"), "jsonl": (".jsonl", ".ndjson")}


def is_local_dataset(name: str) -> bool:
    """Whether `data.dataset_name` is the path of a file rather than a name."""
    known = not name or name in EVAL_DATASET_NAMES or name in RESPONSE_DATASET_NAMES
    return not known and (looks_local(name) or find_path(name) is not None)


def check_sampling(config: "EvalMasterConfig") -> Findings:
    """The metric fits the number of samples, and the samples differ."""
    wanted, generation = config.eval, config.generation
    n, k = wanted.num_tests_per_prompt, wanted.k_value
    if k > n:
        yield (
            f"eval.k_value={k} needs at least {k} answers per prompt, but eval.num_tests_per_prompt={n}. "
            f"Set eval.num_tests_per_prompt to {k} or more."
        )
    greedy = generation.greedy_choice
    if n > 1 and greedy:
        yield (
            f"generation.{greedy} gives the same answer {n} times (eval.num_tests_per_prompt={n}). "
            "Sample with generation.temperature=1.0, or set eval.num_tests_per_prompt=1."
        )
    context = generation.engine.max_model_len
    for key, value in (
        ("generation.max_new_tokens", generation.max_new_tokens),
        ("data.max_input_seq_length", config.data.max_input_seq_length or 0),
    ):
        if value > context:
            yield f"{key}={value} is more than generation.engine.max_model_len={context}. Lower the first."


def check_eval_data(config: "EvalMasterConfig") -> Findings:
    """The data set exists and its environment can grade it."""
    data = config.data
    yield from _check_name(data)
    if data.env_name not in config.env:
        known = ", ".join(sorted(config.env)) or "none"
        yield f"data.env_name={data.env_name!r} is not in env. Environments in env: {known}."
    environment = config.env.get(data.env_name)
    verifier = getattr(environment, "verifier_type", None)
    if verifier is not None:
        yield from _check_verifier(data, verifier)
    if data.dataset_name == ARITHMETIC and data.min_operand > data.max_operand:
        yield f"data.min_operand={data.min_operand} is above data.max_operand={data.max_operand}."


def _check_name(data: "EvalDataConfig") -> Findings:
    name = data.dataset_name
    known = (*EVAL_DATASET_NAMES, *(n for n in RESPONSE_DATASET_NAMES if n not in EVAL_DATASET_NAMES))
    if name is None and data.data_path is None:
        yield "data names no problems. Set data.dataset_name, for example math500, or data.data_path, a local file."
    elif name is not None and name not in known and not is_local_dataset(name):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        yield f"data.dataset_name={name!r} is neither a file nor a known data set.{hint} Known: {', '.join(known)}."
    elif name is not None and is_local_dataset(name) and data.data_path is not None:
        yield f"data.dataset_name={name!r} and data.data_path={data.data_path!r} both name a file. Keep one of them."
    path = data.data_path or name or ""
    endings = _FORMAT_SUFFIXES.get(data.file_format or "", ())
    if endings and not path.removesuffix(".gz").lower().endswith(endings):
        yield (
            f"data.file_format={data.file_format}, but {path!r} does not end in {' or '.join(endings)}. The ending "
            "decides how a file is read: rename the file, or leave data.file_format out."
        )


def _check_verifier(data: "EvalDataConfig", verifier: str) -> Findings:
    asks_for_letter = data.dataset_name in MULTIPLE_CHOICE_NAMES
    reads_letter = verifier.endswith("multichoice")
    key = f"env.{data.env_name}.verifier_type"
    if asks_for_letter and not reads_letter:
        fitting = "multilingual_multichoice" if data.dataset_name in TRANSLATED_MMLU else "english_multichoice"
        yield f"data.dataset_name={data.dataset_name} is multiple choice, but {key}={verifier}. Set {key}={fitting}."
    if reads_letter and data.dataset_name in EVAL_DATASET_NAMES and not asks_for_letter:
        yield f"data.dataset_name={data.dataset_name} has no choices, but {key}={verifier}. Set {key}=math."


def check_eval_files(config: "EvalMasterConfig") -> Findings:
    """Files and folders that can only be local exist."""
    always = ("prompt_file", "system_prompt_file", "chat_template")
    seen: set[str] = set()
    for section, key in config.path_keys():
        value = getattr(section, key)
        if value is None or value in seen:
            continue
        seen.add(value)
        if (key in always or looks_local(value)) and find_path(value) is None:
            yield f"{_place(config, section)}.{key}={value!r} does not exist. Relative paths start at {Path.cwd()}."


def _place(config: "EvalMasterConfig", section: object) -> str:
    return next(name for name in ("generation", "tokenizer", "data") if getattr(config, name) is section)
