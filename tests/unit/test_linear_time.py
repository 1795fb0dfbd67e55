"""Everything that reads what a model writes takes linear time: 100,000 characters of any kind within 0.1 s.

`READERS` has the functions, with the files whose expressions they use. Another test finds every file of the package
that uses `re`, and wants it to be in `READERS`, or in `NOT_OF_MODELS` with the reason.
"""

import ast
import contextlib
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from machine_speed import slowness
from transformers import AutoTokenizer

import nemo_rl
from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.dialects.responses import read_items
from nemo_rl.agents.endpoint.answers import before_stop
from nemo_rl.agents.endpoint.calls import CallError, CallRequest
from nemo_rl.agents.endpoint.forms import read_calls
from nemo_rl.agents.endpoint.server import names_a_key, parsed_body
from nemo_rl.config import RewardPenaltyConfig
from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.data.messages.content import TextRules, content_text, texts_between
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.coverage import _divided
from nemo_rl.environments.grading.dapo import normalize_answer, verify_final_answer
from nemo_rl.environments.grading.final_answer import grade_plain_number
from nemo_rl.environments.grading.hf_math_verify import verify_math, verify_math_components
from nemo_rl.environments.grading.multichoice import verify_english, verify_multilingual
from nemo_rl.environments.grading.vlm_rewards import IMAGE_REWARDS, BoxReward
from nemo_rl.experience.penalties import repeats
from nemo_rl.experience.thinking import sampled_turns, thinking_reader
from nemo_rl.kits.code.blocks import code_to_run, final_code, without_mark
from nemo_rl.kits.code.jaccard import CodeJaccardEnvironment, jaccard_similarity
from nemo_rl.kits.games.sliding_puzzle import SlidingPuzzleEnv
from nemo_rl.kits.judges.questions import JudgeError
from nemo_rl.kits.judges.verdicts import JudgePrompts, quotable_texts, read_reward
from nemo_rl.kits.tools.calculator import calculator
from nemo_rl.kits.tools.retriever import _query_of
from nemo_rl.kits.tools.template import looks_like_a_call
from nemo_rl.kits.tools.vllm import starts_of_answer, text_of_answer

ROOT = Path(nemo_rl.__file__).parent
ASSETS = Path(__file__).parents[1] / "assets"
LENGTH = 100_000
MOST_S = 0.1


class Reader(NamedTuple):
    """A function that reads what a model writes.

    Attributes:
        read: the function.
        files: files, below the package, whose expressions it uses.
    """

    read: Callable[[str], Any]
    files: tuple[str, ...] = ()


TOKENIZER: Any = AutoTokenizer.from_pretrained(ASSETS / "tokenizers/qwen3")
CONTROL = control_tokens_of(TOKENIZER)
JUDGES = {
    name: LLMJudgeConfig.build(base_url="http://127.0.0.1:1/v1", model="judge", **keys)
    for name, keys in {"absolute": {}, "pairwise": {"mode": "pairwise"}}.items()
}
REQUEST = CallRequest(messages=[], tools=[], forced_tool="f")
COMPARISON = ("compare", "numbers", "symbolic", "text", "words")
MATH = (
    *(f"environments/grading/comparison/{name}.py" for name in COMPARISON),
    *(
        "environments/grading/final_answer.py",
        "environments/grading/hf_math_verify.py",
        "environments/grading/grade.py",
    ),
)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}]


def played(environment: Any, text: str) -> Any:
    state = environment.open_episode({"seed": 3, "split": "train", "episode_seed": 1}).metadata
    return environment.step([chat(text)], [state])


PUZZLE = SlidingPuzzleEnv({"max_moves": 5})
JACCARD = CodeJaccardEnvironment({})
READERS: dict[str, Reader] = {
    "math": Reader(lambda text: verify_math(text, "7"), MATH),
    "math, vote": Reader(normalize_answer),
    "math, components": Reader(lambda text: verify_math_components(text, "7"), ("environments/grading/pool.py",)),
    "dapo": Reader(lambda text: verify_final_answer(text, "7"), ("environments/grading/dapo.py",)),
    "letters": Reader(lambda text: verify_english(text, "A"), ("environments/grading/multichoice.py",)),
    "letters of 15 languages": Reader(lambda text: verify_multilingual(text, "A")),
    "plain number": Reader(lambda text: grade_plain_number(text, "7"), ("environments/grading/final_answer.py",)),
    "answer about an image": Reader(
        lambda text: [
            kind().score(text, truth)
            for truth, kind in zip(["7"] * 3 + ["0, 0, 1, 1", "7"], IMAGE_REWARDS.values(), strict=True)
        ]
    ),
    "known answer about an image": Reader(lambda text: BoxReward().score("<answer>1</answer>", text)),
    "program": Reader(final_code, ("kits/code/blocks.py",)),
    "code to run": Reader(code_to_run),
    "program without mark": Reader(without_mark),
    "similarity": Reader(lambda text: jaccard_similarity(text, text), ("kits/code/jaccard.py",)),
    "similarity of a turn": Reader(lambda text: JACCARD.step([chat(text)], [{"ground_truth": "x = 1"}])),
    "judge's score": Reader(
        lambda text: read_reward(JUDGES["absolute"], text, quotable=[text]), ("kits/judges/verdicts.py",)
    ),
    "judge's winner": Reader(lambda text: read_reward(JUDGES["pairwise"], text, quotable=[text])),
    "prompt of a judge": Reader(lambda text: JudgePrompts(JUDGES["absolute"]).of(chat(text), {"ground_truth": text})),
    "texts that a judge may quote": Reader(lambda text: quotable_texts(chat(text), {"ground_truth": text})),
    "thinking": Reader(lambda text: (starts_of_answer(text), text_of_answer(text)), ("kits/tools/vllm.py",)),
    "call of a tool": Reader(lambda text: looks_like_a_call(text, "<tool_call>", {"f": 1})),
    "call by its name": Reader(lambda text: looks_like_a_call(text, '{"name": "', {"f": 1, "g": 2})),
    "query": Reader(lambda text: _query_of({"role": "assistant", "content": text})),
    "answer of reasoning gym": Reader(lambda text: texts_between(text, "<answer>", "</answer>")),
    "move of a game": Reader(lambda text: played(PUZZLE, text)),
    "expression": Reader(calculator),
    "repetitions": Reader(lambda text: repeats([text], text), ("experience/penalties.py",)),
    "thinking tags": Reader(
        lambda text: (
            [
                (turn.malformed, turn.reasoning, turn.final_answer)
                for turn in sampled_turns(_Tags(), list(range(len(text))), [(0, len(text))])
            ]
            if _Tags.give(text)
            else None
        )
    ),
    "text before a stop string": Reader(lambda text: before_stop(text, ["</stop>", "STOP", "\n\n\n"])),
    "forced call": Reader(lambda text: read_calls(text, REQUEST)),
    "items": Reader(
        lambda text: read_items(
            Fields({"input": [{"type": "message", "id": text, "role": "assistant", "content": text}]})
        ),
        ("agents/dialects/responses.py",),
    ),
    "key in a body": Reader(
        lambda text: names_a_key(text.encode(errors="replace"), {}), ("agents/endpoint/server.py",)
    ),
    "body": Reader(lambda text: parsed_body(text.encode(errors="replace"))),
    "control tokens": Reader(
        lambda text: (CONTROL.quoted_chat(chat(text), TextRules()), CONTROL.first_in(text), CONTROL.special_in(text)),
        ("data/messages/control_tokens.py",),
    ),
    "control tokens of tools": Reader(lambda text: CONTROL.shown(str(CONTROL.quoted(chat(text)[1], of_tools=True)))),
    "texts between tags": Reader(lambda text: texts_between(text, "<think>", "</think>")),
    "content": Reader(lambda text: content_text([{"type": "text", "text": text}])),
    "what a message says": Reader(lambda text: _divided(chat(text)[1]), ("data/messages/coverage.py",)),
}


class _Tags:
    """A reader of thinking tags for a text whose characters are its tokens."""

    text = ""

    @classmethod
    def give(cls, text: str) -> bool:
        cls.text = text
        return True

    def read(self, token_ids: list[int]) -> Any:
        return thinking_reader(RewardPenaltyConfig.build(), _Characters()).read(
            [min(ord(self.text[number]), 0x10FFFF) for number in token_ids]
        )


class _Characters:
    """A tokenizer with a token for each character."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))


PIECES = [
    *("\\boxed{", "\\boxed{}", "\\fbox{", "\\boxed{1} and ", "{", "}", "\\", "(", "[", "$", "$ ", "\\[", "\\(", "$$"),
    *("1", "1 ", "1,", "1,234", "\\,", "-", "- ", "+", "1e", "1/", "1:", "x=", "x=1,", "<", ">", "\\frac", "\\frac{"),
    *("a", "\\frac{1}{2}", "\\sqrt(", "\\text{", "\\text{a} ", "<think>", "</think>", "<answer>", "<answer></answer>"),
    *(" ", "  \n", "\t", "\r", "\r\n", "\n", "\n\n", "\u2028", "\xa0", "\x0b", "answer", "answer:", "answer is "),
    *("Answer: A", "final answer is ", "The final answer is $1$. I hope ", "*", "**", "A ", "and ", "\\pm", "\\cup"),
    *("^", "^{", "_", "%", ".", "...", "0.3", "\\overline{3}", "\\begin{pmatrix}", "&", "€", "\\\\", "°", "pi", "√"),
    *(" to ", "3:00 ", "1 h ", "\\left(", "答案：", "~", "|", "`", "``", "```", "``` ", "```\n", "```python\n", "~~~"),
    *("~~~\n", "> ", ">", "- ```", "1. ", "1) ", "* ", "\t- ", "<code>", "</code>", "<code></code>", "<code>\n"),
    *("<tool_call>", "</tool_call>", '<tool_call>{"name": "', "<retrieve>", "</retrieve>", "<retrieve></retrieve>"),
    *("<action>", "</action>", "<action>up</action>", "<action>slide 1</action> ", "<result>", '"', "'", "''", '""'),
    *('{"', '{"a":', "[[A]]", "[[", "]]", "[[A]", "Score: ", "Score: 1", "score", "Score: 1/", "1/10 ", "out of "),
    *("Verdict: A ", "<|im_end|>", "<|im_", "<|", "|>", "sk-", "sk-" + "a" * 43, "msg_", "rs_1_", "_1", "fc_a_1"),
    *("import x\n", "def f():\n", "word ", "ab", "é", "漢", "あ", "\U0001f600", "\u0301", "0", "=", "==", "#", "####"),
    *("</answer>", "<answer>1", "</ answer", "</answer >", "&lt;", "http://", "://a@", "\x1b[", "\x00", "(a+)+", ";"),
]
"""Pieces of hostile texts, which are repeated."""
FORMS: dict[str, Callable[[str], str]] = {
    "alone": lambda text: text,
    "in a box": lambda text: f"\\boxed{{{text}}}",
    "after Answer:": lambda text: f"Answer: {text}",
    "in thinking": lambda text: f"<think>{text}</think><answer>7",
    "after thinking": lambda text: f"<think>a</think>{text}\n",
    "in a block": lambda text: f"```python\n{text}\n```",
    "after a fence": lambda text: f"```{text}",
    "with another end": lambda text: f"7{text}x",
    "in nested brackets": lambda text: "([{" * 500 + text + "}])" * 500,
}
QUICK = ("alone", "in a box")
NESTED = [
    "(" * 50_000 + ")" * 50_000,
    "{" * 50_000 + "}" * 50_000,
    "[" * 50_000 + "]" * 50_000,
    "\\boxed{" * 12_500 + "}" * 12_500,
    "<think>" * 6_600 + "</think>" * 6_600,
    "<code>" * 7_600 + "</code>" * 7_600,
    "\\frac{" * 8_000 + "1}{2}" * 8_000,
    "".join(chr(0x4E00 + number % 20_000) for number in range(LENGTH)),
    "".join(f"{number} " for number in range(16_000)),
    "".join("`" * (number % 400) + "\n" for number in range(480)),
    "".join(f"{' ' * (number % 200)}- x\n" for number in range(980)),
]
"""Texts that are no repetition of a short piece."""


def hostile(forms: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return descriptions and texts."""
    texts = [(piece, piece * (LENGTH // len(piece))) for piece in dict.fromkeys(PIECES)]
    pairs = [(one, other, one + other) for one, other in zip(PIECES[::3], PIECES[1::3], strict=False)]
    texts += [(both, both * (LENGTH // len(both))) for _, _, both in pairs]
    texts += [(text[:20], text) for text in NESTED]
    return [(f"{form}: {name!r}", FORMS[form](text)) for name, text in texts for form in forms]


TOLD = (ValueError, RuntimeError, ArithmeticError, SyntaxError, LookupError, CallError, JudgeError)
"""Errors that readers raise for texts that they cannot read."""


def seconds_of(read: Callable[[str], Any], text: str) -> float:
    """Return the processor seconds of a call; errors that a reader tells its caller are fine."""
    started = time.process_time()
    with contextlib.suppress(
        ValueError, RuntimeError, ArithmeticError, SyntaxError, LookupError, CallError, JudgeError
    ):
        read(text)
    return time.process_time() - started


def slow_texts(read: Callable[[str], Any], texts: list[tuple[str, str]]) -> dict[str, float]:
    """Return the texts that take too long, each at its fastest of five times."""
    found = {}
    for name, text in texts:
        least = seconds_of(read, text)
        for _ in range(4):
            if least < MOST_S:
                break
            least = min(least, seconds_of(read, text) / slowness())
        if least >= MOST_S:
            found[name] = least
    return found


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_text_takes_a_tenth_of_a_second(name):
    read = READERS[name].read
    seconds_of(read, "7")  # imports and caches
    assert slow_texts(read, hostile(QUICK)) == {}


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_hostile_text_in_any_form_takes_a_tenth_of_a_second(name):
    read = READERS[name].read
    seconds_of(read, "7")
    assert slow_texts(read, hostile(tuple(form for form in FORMS if form not in QUICK))) == {}


NOT_OF_MODELS: dict[str, str] = {
    "serving/state.py": "ids of a fixed length",
    "serving/store/sessions.py": "ids of a fixed length",
    "serving/store/checkpoints.py": "names with a limited length, one class of characters after another",
    "serving/store/keys.py": "keys and names with a limited length",
    "launch/python_runs.py": "names of folders",
    "algorithms/runtime/recovery.py": "messages of this library's errors",
    "commands/completion.py": "names of sections",
    "files/hub_download.py": "names of repositories in a configuration",
    "commands/report/images.py": "hashes in this library's logs",
    "experience/logged_images.py": "literal texts, which cannot be matched in several ways",
    "commands/smollm2.py": "names of tensors in a file whose hash is known",
    "config/base/value_types.py": "addresses in a configuration",
    "config/base/defaults.py": "configuration files",
    "config/base/hidden_values.py": "configuration files",
    "config/base/spellings.py": "configuration files",
    "config/base/structure.py": "names of keys",
    "config/loading/overrides.py": "overrides of the command line, and names of keys",
    "config/loading/inheritance.py": "configuration files",
    "config/loading/load.py": "configuration files",
    "config/rules/megatron.py": "names of models",
    "config/rules/resume.py": "names of keys",
    "config/rules/rewards.py": "names in a configuration",
    "config/schema/data.py": "paths of data sets",
    "config/schema/judges.py": "compiles the user's pattern, which the user chooses",
    "data/datasets/preference_datasets.py": "data sets of the user",
    "data/datasets/response_datasets.py": "data sets of the user",
    "data/datasets/rows/control_tokens.py": "data sets of the user",
    "data/datasets/rows/program_tests.py": "tests of data sets",
    "data/datasets/rows/readers.py": "files of data sets",
    "data/effort_levels.py": "chat templates",
    "distributed/workers/logs.py": "stacks of this library",
    "distributed/workers/results.py": "reports of Ray",
    "commands/doctor/machine.py": "a file of torch",
    "commands/doctor/versions.py": "versions of packages",
    "environments/user_errors.py": "tracebacks",
    "agents/nemo_gym/servers.py": "the log of NeMo Gym's servers, of which a part of fixed length is read",
    "kits/tools/interfaces.py": "docstrings of the user's functions",
    "evals/prompts.py": "data sets of the user",
    "files/safe_load.py": "messages of torch",
    "models/dtensor/proof/small.py": "names of modules",
    "models/huggingface/tensor_plans.py": "names of modules",
    "models/generation/vllm/drafting.py": "names of tensors",
    "models/generation/vllm/recurrent.py": "names of tensors",
    "models/generation/vllm/running_model.py": "names of tensors",
    "models/huggingface/sizes.py": "names of GPUs",
    "models/huggingface/load.py": "names of modules",
    "models/megatron/checkpoints/folder.py": "names of tensors",
    "models/megatron/conversion/parts.py": "names of tensors",
    "models/megatron/conversion/rules.py": "names of tensors",
    "models/training/low_rank.py": "names of modules",
    "models/quantization.py": "names of tensors",
    "commands/regrade/stored_samples.py": "names of files",
    "commands/replay/folders.py": "names of files",
    "commands/report/page.py": "the page's own template",
    "commands/report/run_files.py": "paths in a configuration",
    "commands/report/run_state.py": "tracebacks of this library's errors",
    "commands/report/samples.py": "names of files",
    "commands/size/jobs.py": "names of machines",
    "utils/checkpoint.py": "names of folders",
    "utils/log_backends/prometheus.py": "names of metrics",
    "utils/logger.py": "names of folders",
    "utils/logging_setup.py": "messages of the log, with a pattern without nested repetition",
    "utils/venvs/__init__.py": "names of environments",
    "utils/venvs/build.py": "names of packages",
}
"""Files below the package whose expressions read no text of a model, with what they read."""


def files_with_expressions() -> set[str]:
    """Return the files of the package that import `re` or a library like it."""
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {"re", "regex", "fnmatch"} & set(names):
                found.add(file.relative_to(ROOT).as_posix())
    return found


def test_every_file_with_expressions_is_listed():
    read = {file for reader in READERS.values() for file in reader.files}
    assert not read & NOT_OF_MODELS.keys()
    assert files_with_expressions() == (read & files_with_expressions()) | NOT_OF_MODELS.keys()
    assert all((ROOT / file).is_file() for file in read)


def test_texts_between_finds_what_the_expression_finds():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<a>", "</a>", "x", "<a", ">", "\n"], k=rng.randrange(12)))
        assert texts_between(text, "<a>", "</a>") == re.findall("<a>(.*?)</a>", text, re.DOTALL), text


def test_a_quadratic_reader_is_found():
    pattern = re.compile("<answer>(.*?)</answer>", re.DOTALL)
    assert slow_texts(pattern.findall, [("", "<answer>" * (LENGTH // 8))])
