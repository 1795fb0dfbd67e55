"""Run one training step of the configured policy on random tokens, in the worker processes that a run would start.

The rows have the maximum length and fill one microbatch on each rank, so the step needs as much memory as a step of the
run. No file is written.
"""

import math
import time
from typing import Any

from nemo_rl.config import MasterConfig, PolicyConfig
from nemo_rl.utils.errors import NemoRLError


def make_step(config: MasterConfig) -> str:
    """Start the policy, run one update, and end the policy.

    Returns:
        Text with loss, gradient norm and seconds.

    Raises:
        NemoRLError: the workers did not start or died, or the loss is not finite.
    """
    import torch

    from nemo_rl.algorithms.setup.open_policy import OpenPolicy
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.losses.likelihood import NLLLossFn
    from nemo_rl.losses.preference import PreferenceLossFn

    policy_config, started = config.policy, time.perf_counter()
    with OpenPolicy(config.policy, config.cluster) as policy:
        ready = time.perf_counter()
        rows = policy.data_parallel_size * rows_of_microbatch(policy_config)
        shape = (rows, policy_config.max_total_sequence_length)
        batch: BatchedDataDict[Any] = BatchedDataDict(
            input_ids=torch.randint(0, len(policy.tokenizer), shape),
            input_lengths=torch.full((rows,), shape[1]),
            token_mask=torch.ones(shape),
            sample_mask=torch.ones(rows),
        )
        scores = policy_config.reward_model_cfg.enabled
        result: Any = policy.train(batch, PreferenceLossFn() if scores else NLLLossFn(), gbs=rows)
        loss, norm = float(result["loss"]), float(result["grad_norm"])
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise NemoRLError(f"the loss of a step on random tokens is {loss}, the norm of its gradient {norm}.")
    done = time.perf_counter()
    return (
        f"{rows} rows of {shape[1]} tokens: loss {loss:.3g}, gradient norm {norm:.3g}; workers ready in "
        f"{ready - started:.1f} s, step in {done - ready:.1f} s"
    )


def rows_of_microbatch(policy: PolicyConfig) -> int:
    """Return the rows of maximum length in one microbatch of a rank, or in two if that is odd: pairs stay together."""
    from nemo_rl.models.capacity.memory import microbatch_tokens

    rows = max(microbatch_tokens(policy, trains=True) // policy.max_total_sequence_length, 1)
    return rows * (1 + rows % 2)
