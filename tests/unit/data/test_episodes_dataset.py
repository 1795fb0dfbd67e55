"""Seeds of episodes: deterministic, in two splits that share none, and the prompts that environments complete."""

import pytest
from data_helpers import data_config, entry
from tiny_models import make_char_tokenizer

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets import setup_response_data
from nemo_rl.data.datasets.response_datasets import EpisodeRows, EpisodesDataset, load_response_dataset
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

EPISODES = {"dataset_name": "episodes", "processor": "episode_data_processor", "env_name": "blackjack"}


def seeds(rows, count=500):
    return [rows[index]["extra_env_info"]["seed"] for index in range(count)]


def test_rows_follow_from_seed_split_and_index():
    rows = EpisodeRows("train", 1000, 7, "game")
    assert seeds(rows) == seeds(EpisodeRows("train", 600, 7, "game")), "the length changes no row"
    assert seeds(rows) != seeds(EpisodeRows("train", 1000, 8, "game"))
    assert len(set(seeds(rows))) == 500 and max(seeds(rows)) < 2**31
    assert rows[-1] == rows[999] and rows[3]["task_name"] == "game"
    with pytest.raises(IndexError):
        rows[1000]


def test_splits_share_no_seed_whatever_their_seeds():
    train, validation = seeds(EpisodeRows("train", 500, 7, None)), seeds(EpisodeRows("validation", 500, 7, None))
    assert {seed % 2 for seed in train} == {0} and {seed % 2 for seed in validation} == {1}


def test_a_data_set_is_as_long_as_its_entry_says():
    assert len(load_response_dataset(entry(**EPISODES)).dataset) == 1_000_000
    raw = load_response_dataset(entry(**EPISODES, num_samples=50, split_validation_size=0.1))
    assert (len(raw.dataset), len(raw.val_dataset), raw.num_rows) == (50, 5, 50)
    assert raw.val_dataset[0]["extra_env_info"]["split"] == "validation"


def test_another_processor_is_refused():
    with pytest.raises(
        DataError, match="data.default.processor=episode_data_processor; the environment adds the first"
    ):
        EpisodesDataset(DatasetConfig.build(dataset_name="episodes"))
    with pytest.raises(DataError, match="episodes has no split 'test'; choose train or validation"):
        EpisodesDataset(DatasetConfig.build(**EPISODES, split="test"))


def test_the_environment_writes_the_prompt():
    """Without a system prompt its first message is the whole chat; stop strings are those of the environment."""
    from nemo_rl.config.schema.kits import BlackjackConfig

    tokenizer = make_char_tokenizer()
    data = setup_response_data(tokenizer, data_config(train=entry(**EPISODES)), {"blackjack": BlackjackConfig.build()})
    datum = data.train[5]
    assert datum["chat"]["messages"] == [] and datum["stop_strings"] == ["</action>"]
    assert set(datum["extra_env_info"]) == {"seed", "split"}
    first = ObservationRenderer(tokenizer).first_of_prompt(datum["chat"], {"role": "environment", "content": "Deal"})
    assert first["content"] == "<|im_start|>user\nDeal<|im_end|>\n<|im_start|>assistant\n"
