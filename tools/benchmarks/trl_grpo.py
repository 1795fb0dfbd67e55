r"""Run TRL's side of the comparison: GRPOTrainer on one model and one file of prompts.

`grpo_vs_trl.py` starts it with the Python of TRL's environment, where nemo_rl is not installed. It uses TRL's public
interface only. Invariant: one JSON line is written and flushed as soon as a step ends, so that the reader of the file
can measure the time.

    python trl_grpo.py --model FOLDER --prompts FILE.jsonl --metrics FILE.jsonl --steps N
"""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from follows_pattern import follows
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_parts import GenerationClock, boxed_answer_reward

SAMPLES_PER_STEP = 64


def pattern_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 where a completion matches its regular expression, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [follows(text, {"answer": pattern}) for text, pattern in zip(texts, answer, strict=True)]


REWARDS = {"boxed": boxed_answer_reward, "pattern": pattern_reward}


class StepLog(TrainerCallback):
    """Writes a line when a step's metrics are known.

    Args:
        file: output file.
        clock: measures generation.
        stop_at_reward: training ends at this mean reward; above 1: never.
    """

    def __init__(self, file: TextIO, clock: GenerationClock, stop_at_reward: float):
        self._file = file
        self._clock = clock
        self._stop_at_reward = stop_at_reward

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a line; TRL calls this after each step, since `logging_steps` is 1."""
        if not logs or "reward" not in logs:
            return
        row = {
            "step": state.global_step,
            "reward": logs["reward"],
            "mean_gen_tokens": logs["completions/mean_length"],
            "max_gen_tokens": logs["completions/max_length"],
            "num_tokens_so_far": logs["num_tokens"],
            "grad_norm": logs.get("grad_norm"),
            "generation_s": self._clock.take(),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if logs["reward"] >= self._stop_at_reward:
            control.should_training_stop = True


def read_prompts(path: Path) -> Dataset:
    """Read rows `{"problem", "answer"}` as a conversational data set."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [[{"role": "user", "content": row["problem"]}] for row in rows]
    return Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]})


def training_config(arguments: argparse.Namespace) -> GRPOConfig:
    """Return TRL's GRPO settings; features that the other side does not use are off."""
    return GRPOConfig(
        output_dir=str(arguments.metrics.parent / "trl_output"),
        use_cpu=True,
        bf16=arguments.precision == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.microbatch,
        gradient_accumulation_steps=SAMPLES_PER_STEP // arguments.microbatch,
        num_generations=8,
        num_iterations=1,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        use_transformers_continuous_batching=arguments.generation == "continuous",
        max_steps=arguments.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=arguments.seed,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with problem and answer")
    parser.add_argument("--metrics", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="limit of an answer")
    parser.add_argument("--reward", choices=list(REWARDS), default="boxed")
    parser.add_argument("--microbatch", type=int, default=SAMPLES_PER_STEP, help="samples of one pass")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop-at-reward", type=float, default=2.0, help="end at this mean reward")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--generation", choices=("generate", "continuous"), default="generate")
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    clock = GenerationClock(model, "generate" if arguments.generation == "generate" else "generate_batch")
    with arguments.metrics.open("w", encoding="utf-8") as file:
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            reward_funcs=REWARDS[arguments.reward],
            args=training_config(arguments),
            train_dataset=read_prompts(arguments.prompts),
            callbacks=[StepLog(file, clock, arguments.stop_at_reward)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
