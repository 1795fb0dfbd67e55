"""Research in sixty lines: your own data set, environment and loss, and a run that learns from them.

    uv run --extra cpu python examples/own_research.py

A tiny chat model either writes only the result of a sum, or works it out. Rewarded for longer answers, it is right more
often.
"""

import random
import sys

import ray
import torch

from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup
from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType
from nemo_rl.algorithms.utils import get_tokenizer, masked_mean
from nemo_rl.config import load_config
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.utils.logging_setup import configure_logging


def sum_processor(row, spec, tokenizer, max_seq_length, idx) -> DatumSpec:
    """Return a row as a chat that ends with the assistant's header."""
    chat = [{"role": "user", "content": f"{row['a']}+{row['b']}="}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    prompt = {"role": "user", "content": text, "token_ids": ids}
    info = {"truth": str(row["a"] + row["b"])}
    return DatumSpec(
        message_log=[prompt], length=len(ids), extra_env_info=info, loss_multiplier=1.0, idx=idx, task_name="diligence"
    )


@ray.remote
class Diligence(EnvironmentInterface):
    """Rewards an answer by its length, up to a limit."""

    def __init__(self, cfg):
        self.enough = cfg["enough_characters"]

    def step(self, message_log_batch, metadata):
        """Reward the last turn of each conversation."""
        lengths = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(metadata),
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=(lengths / self.enough).clamp(max=1.0),
            terminateds=torch.ones(len(metadata), dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch):
        """Return the share of right answers, in addition to the reward."""
        texts = [log[-1]["content"] for log in batch["message_log"]]
        right = [info["truth"] in text for info, text in zip(batch["extra_env_info"], texts, strict=True)]
        return batch, {"right": sum(right) / len(right)}


class Reinforce(LossFunction):
    """Log-likelihood of the sampled tokens, weighted by their advantages."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        """Return the loss of a microbatch, divided by the tokens of the whole update."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = masked_mean(-data["advantages"][:, 1:] * next_token_logprobs, mask, None, global_valid_toks)
        return loss, {"loss": loss.item()}


configure_logging()
overrides = ["grpo.max_num_steps=12", "grpo.val_period=4", "policy.generation.backend=hf"]
overrides += ["checkpointing.enabled=false", *sys.argv[1:]]
config = load_config("examples/configs/grpo_math_cpu.yaml", overrides, MasterConfig)
config["env"] = {"diligence": {"enough_characters": 60}}
tokenizer = get_tokenizer(config["policy"]["tokenizer"])

draw = random.Random(0)
rows = [{"a": draw.randint(10, 99), "b": draw.randint(10, 99)} for _ in range(264)]
train, val = (
    AllTaskProcessedDataset(part, tokenizer, TaskDataSpec("diligence"), sum_processor, max_seq_length=128)
    for part in (rows[64:], rows[:64])
)
with setup(config, tokenizer, train, val, environments={"diligence": Diligence}, loss_fn=Reinforce()) as run:
    grpo_train(run)
