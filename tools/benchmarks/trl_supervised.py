r"""Run TRL's side of the comparison: SFTTrainer, DPOTrainer or RewardTrainer on one model and one file of token ids.

`supervised_vs_trl.py` starts it with the Python of TRL's environment, where nemo_rl is not installed. It uses TRL's
public interface only. Invariant: one JSON line is written and flushed as soon as a step ends, so that the reader of the
file can measure the time.

    python trl_supervised.py --algorithm sft --model FOLDER --rows FILE.jsonl --metrics FILE.jsonl ...
"""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class StepLog(TrainerCallback):
    """Writes a line when a step's metrics are known.

    Args:
        file: output file.
    """

    def __init__(self, file: TextIO):
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a line; TRL calls this after each step, since `logging_steps` is 1."""
        if not logs or "loss" not in logs:
            return
        row = {"step": state.global_step, "loss": float(logs["loss"]), "num_tokens_so_far": float(logs["num_tokens"])}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def common_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of all three trainers; features that the other side does not use are off."""
    return {
        "output_dir": str(arguments.metrics.parent / "trl_output"),
        "use_cpu": True,
        "bf16": arguments.precision == "bfloat16",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": arguments.microbatch,
        "gradient_accumulation_steps": arguments.accumulate,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "max_steps": arguments.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "train_sampling_strategy": "sequential",
    }


def make_trainer(arguments: argparse.Namespace, rows: Dataset, callback: StepLog) -> Trainer:
    """Build the trainer of the algorithm."""
    settings = common_settings(arguments)
    shared = {
        "processing_class": AutoTokenizer.from_pretrained(arguments.model),
        "train_dataset": rows,
        "callbacks": [callback],
    }
    if arguments.algorithm == "rm":
        scorer = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=1, dtype=torch.float32)
        return RewardTrainer(model=scorer, args=RewardConfig(max_length=None, **settings), **shared)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.algorithm == "dpo":
        return DPOTrainer(model=model, args=DPOConfig(beta=arguments.beta, max_length=None, **settings), **shared)
    packing = {"packing": arguments.packed_tokens is not None, "max_length": arguments.packed_tokens}
    return SFTTrainer(model=model, args=SFTConfig(completion_only_loss=True, **packing, **settings), **shared)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", choices=("sft", "dpo", "rm"), required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL with the trainer's columns of token ids")
    parser.add_argument("--metrics", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True, help="rows or pairs of one pass")
    parser.add_argument("--accumulate", type=int, required=True, help="passes of one update")
    parser.add_argument("--packed-tokens", type=int, help="tokens of a packed row; without it rows are padded")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    rows = Dataset.from_list([json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()])
    with arguments.metrics.open("w", encoding="utf-8") as file:
        make_trainer(arguments, rows, StepLog(file)).train()


if __name__ == "__main__":
    main()
