"""Check keys of an evaluation against each other, and list its data sets.

Invariant: a rule reads only names and the existence of local paths.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config.base.names import ARITHMETIC, RESPONSE_DATASET_NAMES
from nemo_rl.config.base.paths import find_path, looks_local
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.data import check_environment, check_operands, check_unused
from nemo_rl.config.rules.engines import ENGINE_SIZES, check_division
from nemo_rl.config.schema.algorithms.evaluation import (
    EvalConfig,
    EvalDataConfig,
    EvalGenerationConfig,
    EvalTokenizerConfig,
)
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.utils.errors import did_you_mean

LOCALES = (
    *("AR-XY", "BN-BD", "DE-DE", "ES-LA", "FR-FR", "HI-IN", "ID-ID"),
    *("IT-IT", "JA-JP", "KO-KR", "PT-BR", "SW-KE", "YO-NG", "ZH-CN"),
)
"""Languages of the translated MMLU, as in names such as mmlu_DE-DE."""

TRANSLATED_MMLU = tuple(f"mmlu_{locale}" for locale in LOCALES)
MULTIPLE_CHOICE_NAMES = ("gpqa", "gpqa_diamond", "mmlu", "mmlu_pro", *TRANSLATED_MMLU)
EVAL_DATASET_NAMES = ("aime2024", "aime2025", "gsm8k", "math", "math500", ARITHMETIC, *MULTIPLE_CHOICE_NAMES)
"""Built-in data sets for evaluation. Those for training (`RESPONSE_DATASET_NAMES`) can be used too."""

_FORMAT_SUFFIXES = {"csv": (".csv",), "json": (".json", ".jsonl", ".ndjson"), "jsonl": (".jsonl", ".ndjson")}


def is_local_dataset(name: str) -> bool:
    """Return whether `data.dataset_name` is the path of a file and not a name."""
    known = not name or name in EVAL_DATASET_NAMES or name in RESPONSE_DATASET_NAMES
    return not known and (looks_local(name) or find_path(name) is not None)


def check_sampling(wanted: EvalConfig, generation: EvalGenerationConfig) -> Findings:
    """Check that the metric fits the number of samples, and that the samples differ."""
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


def check_lengths(generation: EvalGenerationConfig, data: EvalDataConfig) -> Findings:
    """Check that lengths fit the engine's context or, with an endpoint, that no key needs a tokenizer."""
    context = generation.engine.max_model_len
    if generation.endpoint is not None:
        if data.max_input_seq_length not in (None, context):
            yield (
                f"data.max_input_seq_length={data.max_input_seq_length} counts tokens, and with generation.endpoint "
                "there is no tokenizer. Leave it out: the endpoint says which prompts are too long."
            )
        return
    for key, value in (
        ("generation.max_new_tokens", generation.max_new_tokens),
        ("data.max_input_seq_length", data.max_input_seq_length or 0),
    ):
        if value > context:
            yield f"{key}={value} is more than generation.engine.max_model_len={context}. Lower the first."


def check_answer_bits(generation: EvalGenerationConfig, cluster: ClusterConfig) -> Findings:
    """Refuse settings of an evaluation with which the bits of an answer would depend on other answers."""
    key, engine = "generation.zero_mismatch=true", generation.engine
    if not generation.zero_mismatch:
        return
    if generation.endpoint is not None:
        yield f"{key} concerns engines of the run, and generation.endpoint names another server. Set it to false."
        return
    if cluster.uses_gpu:
        yield f"{key} computes on CPUs only so far, and cluster.device={cluster.device}. Set it to false."
    if generation.backend not in ("hf", "vllm"):
        yield (
            f"{key} needs an engine whose rows do not depend on each other, and generation.backend="
            f"{generation.backend} does not have this property. Set it to hf or vllm."
        )
    sizes = {f"generation.engine.{name}": getattr(engine, name) for name in ENGINE_SIZES}
    yield from check_division(key, sizes)


def check_endpoint_keys(generation: EvalGenerationConfig, tokenizer: EvalTokenizerConfig) -> Findings:
    """Check that no key concerns a tokenizer, which an evaluation at an endpoint does not have."""
    if tokenizer.name != generation.model_name:
        yield (
            f"tokenizer.name={tokenizer.name} has no effect with generation.endpoint, whose server has the tokenizer. "
            "Leave it out."
        )
    if tokenizer.chat_template != "default" or tokenizer.chat_template_kwargs:
        yield (
            "tokenizer.chat_template and chat_template_kwargs have no effect with generation.endpoint, whose server "
            "renders the messages. Leave them out; vLLM takes generation.endpoint.extra_body.chat_template_kwargs."
        )


def check_eval_data(data: EvalDataConfig, environments: Mapping[str, Any]) -> Findings:
    """Check that the data set exists and its environment can grade it."""
    yield from _check_name(data)
    yield from check_environment("data", data.env_name, environments)
    yield from check_unused(environments, {data.env_name})
    environment = environments.get(data.env_name)
    verifier = getattr(environment, "verifier_type", None)
    if verifier is not None:
        yield from _check_verifier(data, verifier)
    if data.dataset_name == ARITHMETIC:
        yield from check_operands("data.", data.min_operand, data.max_operand)


def _check_name(data: EvalDataConfig) -> Findings:
    name = data.dataset_name
    known = (*EVAL_DATASET_NAMES, *(n for n in RESPONSE_DATASET_NAMES if n not in EVAL_DATASET_NAMES))
    if name is None and data.data_path is None:
        yield "data names no problems. Set data.dataset_name, for example math500, or data.data_path, a local file."
    elif name is not None and name not in known and not is_local_dataset(name):
        hint = did_you_mean(name, known)
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


def _check_verifier(data: EvalDataConfig, verifier: str) -> Findings:
    asks_for_letter = data.dataset_name in MULTIPLE_CHOICE_NAMES
    reads_letter = verifier.endswith("multichoice")
    key = f"env.{data.env_name}.verifier_type"
    if asks_for_letter and not reads_letter:
        fitting = "multilingual_multichoice" if data.dataset_name in TRANSLATED_MMLU else "english_multichoice"
        yield f"data.dataset_name={data.dataset_name} is multiple choice, but {key}={verifier}. Set {key}={fitting}."
    if reads_letter and data.dataset_name in EVAL_DATASET_NAMES and not asks_for_letter:
        yield f"data.dataset_name={data.dataset_name} has no choices, but {key}={verifier}. Set {key}=math."
