"""Load data sets with the functions that programs for NeMo RL call. Each calls a function of this library."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config import DataConfig, RolloutMasterConfig, SupervisedDataConfig
from nemo_rl.data.datasets import setup
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.user_data import UNNAMED
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.utils.errors import NotBuiltError

type Data = tuple[MixedDataset, MixedDataset | None]
type DataAndEnvironments = tuple[MixedDataset, MixedDataset | None, dict[str, Any], dict[str, Any]]


def setup_response_data(
    tokenizer: TokenizerType,
    data_config: DataConfig | Mapping[str, Any],
    env_configs: Mapping[str, Any] | None = None,
    is_vlm: bool = False,
) -> Data | DataAndEnvironments:
    """Load, check and combine all data sets of prompts (`data.datasets.setup.setup_response_data`).

    Args:
        tokenizer: Tokenizer that renders and tokenises prompts.
        env_configs: Section `env` of the configuration, or None if answers are not graded (distillation).
        is_vlm: Must be False.

    Returns:
        Training rows and validation rows (or None). With `env_configs`, also two mappings from task name to the section
        of its environment, for training and validation. `setup(..., environments=...)` starts each environment once.

    Raises:
        NotBuiltError: `is_vlm` is True.
        ConfigError, DataError: See `data.datasets.setup.setup_response_data`.
    """
    if is_vlm:
        raise NotBuiltError("is_vlm=True belongs to multimodal data (VLM), which is not built yet.")
    config = DataConfig.of(data_config)
    if env_configs is None:
        data = setup.setup_response_data(tokenizer, config)
        return data.train, data.all_validation
    sections = environment_sections(env_configs)
    data = setup.setup_response_data(tokenizer, config, sections)
    environments = {task: sections[name] for task, name in data.task_env.items()}
    return data.train, data.all_validation, environments, dict(environments)


def setup_preference_data(
    tokenizer: TokenizerType, data_config: SupervisedDataConfig | Mapping[str, Any]
) -> tuple[MixedDataset, dict[str, MixedDataset]]:
    """Load, check and combine all data sets of pairs (`data.datasets.setup.setup_preference_data`).

    Returns:
        Training rows, and validation rows by the name of their data set. Rows without a name are under "default".
    """
    data = setup.setup_preference_data(tokenizer, SupervisedDataConfig.of(data_config))
    unnamed = {} if data.validation is None else {UNNAMED: data.validation}
    return data.train, {**unnamed, **data.named_validation}


def environment_sections(env_configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of environments. Those with a schema are checked and completed with defaults.

    Raises:
        ConfigError: A key is unknown or wrong.
    """
    return RolloutMasterConfig.build(policy={"model_name": ""}, env=dict(env_configs)).env
