"""Read data sets of questions and answers by name.

Invariant: a data set has the same columns for every source (the hub, a mirror in `data_path`, or a file). A new data
set needs one line in `DATASET_REGISTRY`, or a class with one method.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.config.base.names import PLAIN_TEXT, PROMPTS
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION, ArithmeticDataset, ProductsDataset, WorkedSumsDataset
from nemo_rl.data.datasets.code_datasets import CODE_REGISTRY
from nemo_rl.data.datasets.conversation_datasets import (
    MessagesDataset,
    OpenAIFormatDataset,
    OpenAssistantDataset,
    PlainTextDataset,
    message_list,
)
from nemo_rl.data.datasets.hub import AnsweredDataset, HubSource, load_table
from nemo_rl.data.datasets.image_datasets import IMAGE_REGISTRY
from nemo_rl.data.datasets.nemo_gym import NemoGymDataset
from nemo_rl.data.datasets.raw_dataset import (
    FormattedRow,
    FormattedRows,
    GeneratedDataset,
    GeneratedRows,
    RawDataset,
    Row,
)
from nemo_rl.data.datasets.registry import DatasetFactory, DatasetKind
from nemo_rl.data.datasets.rows.shapes import ShapesDataset
from nemo_rl.data.datasets.rows.values import kind_of, plain_text, text_of, value_of
from nemo_rl.data.processors import episode_data_processor, get_processor
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

DEFAULT_NUM_SAMPLES = {TRAIN: 1_000_000, VALIDATION: 256}
_DROPPED_BITS = 33
"""Number of dropped bits: seeds have 31 bits, as simulators may refuse larger ones. The last bit is the split."""


class EpisodeRows(GeneratedRows):
    """Seeds as formatted rows with empty `messages`, and with `seed` and `split` in `extra_env_info`."""

    def _row(self, index: int) -> FormattedRow:
        drawn = derive_seed(self._seed, "episodes", self._split, index) >> _DROPPED_BITS
        info = {"seed": 2 * drawn + (self._split == VALIDATION), "split": self._split}
        return {"messages": [], "extra_env_info": info, "task_name": self._task_name}


class EpisodesDataset(GeneratedDataset):
    """Seeds from which the environment makes the prompts of episodes.

    Args:
        config: `num_samples`, `seed` and `split` are used. `processor` must be `episode_data_processor`.
        role: "train" or "validation".

    Raises:
        DataError: the split or the processor does not fit.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        split = config.split or role
        if split not in DEFAULT_NUM_SAMPLES:
            raise DataError(f"episodes has no split {split!r}; choose {TRAIN} or {VALIDATION}.")
        if get_processor(config.processor) is not episode_data_processor:
            raise DataError(
                f"dataset_name: episodes has no messages, which processor: {config.processor} needs. Set "
                "data.default.processor=episode_data_processor; the environment adds the first message."
            )
        self._config = config
        self.num_rows = config.num_samples or DEFAULT_NUM_SAMPLES[split]
        self.dataset = self._draw(split, self.num_rows, config.seed)
        self.bad_rows = []

    def _draw(self, split: str, num_samples: int, seed: int) -> EpisodeRows:
        return EpisodeRows(split, num_samples, seed, self._config.env_name)


class ResponseDataset(AnsweredDataset):
    """Rows with a question and an answer in two columns."""

    def columns(self) -> list[str]:
        """Return the columns that `to_messages` reads."""
        return [self.input_key, self.output_key]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the conversation of a raw row, with the answer as the last message.

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """
        return [
            {"role": "user", "content": text_of(row, self.input_key)},
            {"role": "assistant", "content": text_of(row, self.output_key)},
        ]


class PromptDataset(RawDataset):
    """Prompts from a local file, a mirror or the hub, with or without a known answer.

    A row has a text or a list of messages in the column `input_key` (default: `prompt`), or a list in the column
    `messages`. If it has a column `output_key` (default: `answer`), this is the known answer.

    Args:
        config: A data set of `data.train` or `data.validation`.
        role: "train" or "validation", which determines the default split.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        self._input_key = config.input_key or "prompt"
        self._output_key = config.output_key or "answer"
        table = load_table(config, role, HubSource(None))
        columns = [self._input_key, self._output_key, "messages"]
        self.take_rows(table, FormattedRows(table, columns, self.to_messages, config.env_name))

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the prompt of a raw row, with the known answer as the last message (empty if there is none).

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """
        key = "messages" if self._input_key not in row and "messages" in row else self._input_key
        if isinstance(value_of(row, key), list):
            prompt = message_list(row[key], key)
        else:
            prompt = [{"role": "user", "content": text_of(row, key)}]
        answer = row.get(self._output_key)
        known = "" if not isinstance(answer, str | int | float) else plain_text(answer, repr(self._output_key))
        return [*prompt, {"role": "assistant", "content": known}]


class GSM8KDataset(ResponseDataset):
    """The data set GSM8K. The answer is the number after `####`, without thousands separators."""

    _FINAL = re.compile(r"####\s*(\S.*?)\s*$")

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return question and final number."""
        question, answer = super().to_messages(row)
        final = self._FINAL.search(answer["content"])
        if final is None:
            raise RowError(f"no number after '####' in {self.output_key!r}")
        return [question, {"role": "assistant", "content": final.group(1).replace(",", "")}]


class DAPOMathDataset(ResponseDataset):
    """The data set DAPO-Math. `prompt` contains the question as messages, and a nested column the answer."""

    def columns(self) -> list[str]:
        """Return the two nested columns."""
        return ["prompt", "reward_model"]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the prompt and `reward_model.ground_truth`."""
        prompt, reward_model = value_of(row, "prompt"), value_of(row, "reward_model")
        if not isinstance(reward_model, Mapping):
            raise RowError(f"'reward_model' is {kind_of(reward_model)}, not an object")
        answer = {"role": "assistant", "content": text_of(reward_model, "ground_truth")}
        return [*message_list(prompt, "prompt"), answer]


class SquadDataset(ResponseDataset):
    """The data set SQuAD. The context is the system message, and the first answer's text is the answer."""

    def columns(self) -> list[str]:
        """Return the columns of context, question and answers."""
        return ["context", "question", "answers"]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return context, question and first answer."""
        answers = value_of(row, "answers")
        texts = answers.get("text") if isinstance(answers, Mapping) else None
        if not isinstance(texts, list):
            raise RowError("'answers' is not an object with a list 'text'")
        if not texts:
            raise RowError("empty 'answers'")
        return [
            {"role": "system", "content": text_of(row, "context")},
            {"role": "user", "content": text_of(row, "question")},
            {"role": "assistant", "content": text_of({"answers": texts[0]}, "answers")},
        ]


def _named(source: HubSource, kind: type[ResponseDataset] = ResponseDataset) -> DatasetFactory:
    return partial(kind, source=source)


_GSM8K = HubSource("openai/gsm8k", "question", "answer", ("main",), validation_split="test")

DATASET_REGISTRY: dict[str, DatasetFactory] = {
    "OpenMathInstruct-2": _named(
        HubSource("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M")
    ),
    "DeepScaler": _named(HubSource("agentica-org/DeepScaleR-Preview-Dataset")),
    "DAPOMath17K": _named(HubSource("BytedTsinghua-SIA/DAPO-Math-17k"), DAPOMathDataset),
    "DAPOMathAIME2024": _named(HubSource("BytedTsinghua-SIA/AIME-2024"), DAPOMathDataset),
    "AIME2024": _named(HubSource("HuggingFaceH4/aime_2024")),
    "AIME2025": _named(
        HubSource(
            "opencompass/AIME2025",
            "question",
            subsets=("AIME2025-I", "AIME2025-II"),
            split="test",
        )
    ),
    "AIME2026": _named(HubSource("MathArena/aime_2026")),
    "gsm8k": _named(_GSM8K, GSM8KDataset),
    "GSM8K": _named(_GSM8K, GSM8KDataset),
    "NuminaMath-1.5": _named(HubSource("AI-MO/NuminaMath-1.5")),
    "OpenR1-Math-220k": _named(HubSource("open-r1/OpenR1-Math-220k")),
    "squad": _named(HubSource("rajpurkar/squad", validation_split="validation"), SquadDataset),
    "tulu3_sft_mixture": partial(MessagesDataset, source=HubSource("allenai/tulu-3-sft-mixture")),
    "open_assistant": OpenAssistantDataset,
    "openai_format": OpenAIFormatDataset,
    PLAIN_TEXT: PlainTextDataset,
    **CODE_REGISTRY,
    **IMAGE_REGISTRY,
    "ResponseDataset": ResponseDataset,
    PROMPTS: PromptDataset,
    "arithmetic": ArithmeticDataset.of_entry,
    "arithmetic_products": ProductsDataset.of_entry,
    "arithmetic_sft": WorkedSumsDataset,
    "episodes": EpisodesDataset,
    "shapes": ShapesDataset,
    "NemoGymDataset": NemoGymDataset,
}


RESPONSES = DatasetKind("ResponseDataset", DATASET_REGISTRY)


def load_response_dataset(config: DatasetConfig | Mapping[str, Any], role: str = TRAIN) -> RawDataset:
    """Load a configured data set (`DatasetKind.load`)."""
    return RESPONSES.load(config, role)
