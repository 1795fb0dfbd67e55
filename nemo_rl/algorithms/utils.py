"""Re-export small functions under the import path of NeMo RL."""

from nemo_rl.algorithms.credit.group_statistics import calculate_baseline_and_std_per_prompt
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.divergence import calculate_kl
from nemo_rl.losses.reductions import masked_mean, masked_var
from nemo_rl.utils.seed import set_seed

__all__ = [
    "calculate_baseline_and_std_per_prompt",
    "calculate_kl",
    "get_tokenizer",
    "masked_mean",
    "masked_var",
    "set_seed",
]
