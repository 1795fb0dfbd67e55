r"""Run TRL's side of the comparison: GOLDTrainer or SDPOTrainer on one model, one teacher and one file of prompts.

`distillation_vs_trl.py` starts it with the Python of TRL's environment, where nemo_rl is not installed. It uses TRL's
public interface only. One JSON line is written and flushed as soon as a step ends.

    python trl_distillation.py --case same_tokens --model FOLDER --teacher FOLDER --prompts FILE.jsonl
        --metrics FILE.jsonl --steps N
"""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainerCallback
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl_parts import AnswerRecord, GenerationClock, boxed_answer_reward

SAMPLES_PER_STEP = 64


class StepLog(TrainerCallback):
    """Writes a line when a step's metrics are known.

    Args:
        file: output file.
        clock: measures generation.
        record: has the rewards of the step's answers.
    """

    def __init__(self, file: TextIO, clock: GenerationClock, record: AnswerRecord):
        self._file = file
        self._clock = clock
        self._record = record

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a line; TRL calls this after each step, since `logging_steps` is 1."""
        if not logs or "loss" not in logs:
            return
        row = {"step": state.global_step, "loss": logs["loss"], "generation_s": self._clock.take()}
        self._file.write(json.dumps(row | self._record.take()) + "\n")
        self._file.flush()


def shared_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that both trainers have; features that the other side does not use are off."""
    return {
        "output_dir": str(arguments.metrics.parent / "trl_output"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": SAMPLES_PER_STEP,
        "gradient_accumulation_steps": 1,
        "max_completion_length": arguments.max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
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
        "seed": arguments.seed,
    }


def gold_trainer(model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[Any], options: Any) -> Trainer:
    """Make a trainer whose teacher scores the student's own answers (`lmbda` 1), as on-policy distillation does.

    The answers in the rows are not trained on.
    """
    matched = {"uld_use_hybrid_loss": True, "uld_hybrid_matched_weight": 1.0, "uld_hybrid_unmatched_weight": 1.0}
    compared: dict[str, Any] = {"use_uld_loss": True, **matched} if options.case == "other_tokens" else {}
    chats = [
        [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"},
        ]
        for row in rows
    ]
    config = GOLDConfig(
        **shared_settings(options), lmbda=1.0, beta=0.0, max_length=options.max_total_tokens, **compared
    )
    return GOLDTrainer(
        model=model,
        teacher_model=AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.float32),
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"messages": chats}),
    )


def sdpo_trainer(model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[Any], options: Any) -> Trainer:
    """Make a trainer whose teacher is the policy of the start, which sees a right answer of the same group."""
    config = SDPOConfig(
        **shared_settings(options),
        num_generations=8,
        distillation_mode="sampled_token",
        distillation_alpha=1.0,
        distillation_is_clip=None,
        teacher_model_kind="base",
        reprompt_template="{prompt}\n\n{solution}{feedback}",
        solution_template=options.solution_template.replace("{solution}", "{successful_previous_attempt}"),
    )
    prompts = [[{"role": "user", "content": row["problem"]}] for row in rows]
    return SDPOTrainer(
        model=model,
        reward_funcs=boxed_answer_reward,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]}),
    )


TRAINERS = {"same_tokens": gold_trainer, "other_tokens": gold_trainer, "own_solutions": sdpo_trainer}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=list(TRAINERS), required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--teacher", type=Path, help="Hugging Face folder")
    parser.add_argument("--solution-template", help="text that shows the policy as its own teacher a {solution}")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with problem and answer")
    parser.add_argument("--metrics", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="limit of an answer")
    parser.add_argument("--max-total-tokens", type=int, default=128, help="limit of prompt and answer")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    answers = {}
    for row in rows:
        chat = [{"role": "user", "content": row["problem"]}]
        answers[tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)] = row["answer"]
    record = AnswerRecord(model, tokenizer, answers)
    clock = GenerationClock(model, "generate")
    trainer = TRAINERS[arguments.case](model, tokenizer, rows, arguments)
    with arguments.metrics.open("w", encoding="utf-8") as file:
        trainer.add_callback(StepLog(file, clock, record))
        trainer.train()


if __name__ == "__main__":
    main()
