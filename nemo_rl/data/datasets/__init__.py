"""Re-export the functions that load data sets by name or path. Each row is checked."""

from nemo_rl.compat.public_names import public_names
from nemo_rl.data.collate_fn import eval_collate_fn, rl_collate_fn
from nemo_rl.data.datasets.preference_datasets import load_preference_dataset
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.datasets.response_datasets import DATASET_REGISTRY, load_response_dataset
from nemo_rl.data.datasets.setup import RunData, setup_response_data
from nemo_rl.data.datasets.utils import merge_datasets, update_single_dataset_config

__all__ = [
    "DATASET_REGISTRY",
    "AllTaskProcessedDataset",
    "MixedDataset",
    "RawDataset",
    "RunData",
    "eval_collate_fn",
    "load_preference_dataset",
    "load_response_dataset",
    "merge_datasets",
    "rl_collate_fn",
    "setup_response_data",
    "update_single_dataset_config",
]

__getattr__ = public_names(__name__, {"load_eval_dataset": "nemo_rl.evals.prompts"})
