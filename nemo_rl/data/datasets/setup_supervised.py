"""From `data` of the config to conversations, or pairs of answers, to train and validate on.

Runs before Ray starts; `setup` does the same for prompts. Invariant: every row is either usable or reported with its
place; what can be known without a model is known before training. Rows are rendered at the start as well (the first
`CHECKED_ROWS` of each data set), because a row may be too long, or be one that the chat template refuses; later ones
are reported when they are drawn and do not train.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemo_rl.config import DatasetConfig, SupervisedDataConfig
from nemo_rl.data.bad_rows import BadRow, report_bad_rows
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.feedback_datasets import load_feedback_dataset
from nemo_rl.data.datasets.preference_datasets import load_preference_dataset
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.datasets.response_datasets import held_out_rows, load_response_dataset
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.processors import feedback_processor, get_processor, preference_preprocessor, sft_processor
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

CHECKED_ROWS = 2000

type Loader = Callable[[DatasetConfig, str], RawDataset]
type Processor = Callable[..., Any]


@dataclass(frozen=True)
class SupervisedData:
    """What the functions of this file return.

    Attributes:
        train: training rows.
        validation: validation rows without a name, or None.
        named_validation: validation rows by the name of their entry.
        bad_rows: rows left out of any of the data sets, with their places.
    """

    train: MixedDataset
    validation: MixedDataset | None
    bad_rows: list[BadRow]
    named_validation: Mapping[str, MixedDataset] = field(default_factory=dict)


def setup_sft_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> SupervisedData:
    """Load, check and combine all data sets of conversations.

    Args:
        tokenizer: renders and tokenises.
        data_config: `data` of the config.

    Raises:
        DataError: unknown names, missing files, too many bad rows, or a chat template that does not fit.
    """
    return _setup(tokenizer, data_config, load_response_dataset, _sft_processor)


def setup_preference_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> SupervisedData:
    """Load, check and combine all data sets of pairs; arguments and errors as `setup_sft_data`."""
    return _setup(tokenizer, data_config, load_preference_dataset, _pair_processor)


def setup_feedback_data(tokenizer: TokenizerType, data_config: SupervisedDataConfig) -> SupervisedData:
    """Load, check and combine all data sets of labelled answers and pairs; as `setup_sft_data`."""
    return _setup(tokenizer, data_config, load_feedback_dataset, _feedback_processor)


def _pair_processor(entry: DatasetConfig, data_config: SupervisedDataConfig) -> Processor:
    return _with_tokens_around(preference_preprocessor, data_config)


def _feedback_processor(entry: DatasetConfig, data_config: SupervisedDataConfig) -> Processor:
    return _with_tokens_around(feedback_processor, data_config)


def _sft_processor(entry: DatasetConfig, data_config: SupervisedDataConfig) -> Processor:
    chosen: Processor = get_processor(entry.processor)
    return _with_tokens_around(chosen, data_config) if chosen is sft_processor else chosen


def _with_tokens_around(process: Processor, data_config: SupervisedDataConfig) -> Processor:
    return partial(
        process,
        add_bos=data_config.add_bos,
        add_eos=data_config.add_eos,
        add_generation_prompt=data_config.add_generation_prompt,
    )


def _setup(
    tokenizer: TokenizerType,
    data_config: SupervisedDataConfig,
    load: Loader,
    processor: Callable[[DatasetConfig, SupervisedDataConfig], Processor],
) -> SupervisedData:
    """Validation is the rows set aside from training data followed by the entries of `data.validation`."""
    train: list[AllTaskProcessedDataset] = []
    validation: dict[str | None, list[AllTaskProcessedDataset]] = {}
    bad_rows: list[BadRow] = []
    entries = [(entry, TRAIN) for entry in data_config.train_entries]
    entries += [(entry, VALIDATION) for entry in data_config.validation_entries]
    for entry, role in entries:
        raw = load(entry, role)
        spec = TaskDataSpec(entry.env_name, entry.prompt_file, entry.system_prompt_file)
        process = partial(
            AllTaskProcessedDataset,
            tokenizer=tokenizer,
            default_task_data_spec=spec,
            task_data_processors=processor(entry, data_config),
            max_seq_length=data_config.max_input_seq_length,
        )
        parts = [(process(raw.dataset), role)]
        held_out = held_out_rows(raw, entry, data_config.validation_entries)
        if held_out is not None:
            parts.append((process(held_out), VALIDATION))
        bad = raw.bad_rows
        for rows, use in parts:
            bad = bad + rows.leave_out_unusable(CHECKED_ROWS, over_long=True)
            (train if use == TRAIN else validation.setdefault(entry.name, [])).append(rows)
        bad = list(dict.fromkeys(bad))
        name = entry.data_path or str(entry.dataset_name)
        report_bad_rows(name, bad, raw.num_rows, data_config.max_bad_row_share, raw.first_columns)
        bad_rows += bad
    if not train:
        raise DataError("data.train is empty: give it a dataset_name or a data_path.")
    sets = {name: MixedDataset(parts) for name, parts in validation.items()}
    data = SupervisedData(MixedDataset(train), sets.pop(None, None), bad_rows, {str(n): s for n, s in sets.items()})
    num_validation = sum(len(part) for parts in validation.values() for part in parts)
    logger.info("Data: %d training and %d validation rows.", len(data.train), num_validation)
    return data
