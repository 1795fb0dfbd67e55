"""Generates the seeds of episodes for environments that make their own situations: games, simulators, generated tasks.

Chosen with `dataset_name: episodes`; needs no file and no network. Invariant: a row is a function of the entry's seed,
the split and its index, so a resumed run continues with the same episodes, and no seed is in both splits.
"""

from collections.abc import Sequence
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic.problems import TRAIN, VALIDATION
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RawDataset
from nemo_rl.data.processors import episode_data_processor, get_processor
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

DEFAULT_NUM_SAMPLES = {TRAIN: 1_000_000, VALIDATION: 256}
_DROPPED_BITS = 33
"""Seeds keep 31 bits, since simulators may refuse larger ones; the last bit is that of the split."""


class EpisodeRows(Sequence[FormattedRow]):
    """Seeds as formatted rows: `messages` (none), `extra_env_info` with `seed` and `split`, `task_name`.

    Args:
        split: "train" or "validation".
        num_samples: number of rows.
        seed: chooses the seeds.
        task_name: put into every row.
    """

    def __init__(self, split: str, num_samples: int, seed: int, task_name: str | None) -> None:
        self._split = split
        self._num_samples = num_samples
        self._seed = seed
        self._task_name = task_name

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: Any) -> Any:
        index = range(self._num_samples)[position]
        drawn = derive_seed(self._seed, "episodes", self._split, index) >> _DROPPED_BITS
        info = {"seed": 2 * drawn + (self._split == VALIDATION), "split": self._split}
        return {"messages": [], "extra_env_info": info, "task_name": self._task_name}


class EpisodesDataset(RawDataset):
    """Seeds of episodes; the environment makes the prompts of them.

    Args:
        config: `num_samples`, `seed` and `split` are used; `processor` has to be `episode_data_processor`.
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
        num_samples = config.num_samples or DEFAULT_NUM_SAMPLES[split]
        self.dataset = EpisodeRows(split, num_samples, config.seed, config.env_name)
        self.bad_rows = []
        self.num_rows = num_samples

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Add episodes of validation; those of training stay as they are.

        Args:
            test_size: number of episodes, or (below 1) their share of those of training.
            seed: chooses the episodes.
        """
        if test_size:
            share = len(self.dataset) * test_size if test_size < 1 else test_size
            self.val_dataset = EpisodeRows(VALIDATION, max(1, round(share)), seed, self._config.env_name)
