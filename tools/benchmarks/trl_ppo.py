r"""Run TRL's side of the comparison of PPO: its PPOTrainer on one model, one file of prompts and a rule as reward.

`ppo_vs_trl.py` starts it with the Python of the environment of the last TRL that has a PPOTrainer, where nemo_rl is not
installed. It uses TRL's public interface only; `RuleRewardModel` has the parts of a sequence classifier that the
trainer calls. Invariant: one JSON line is written and flushed as soon as a step ends, so that the reader of the file
can measure the time.

    python trl_ppo.py --model FOLDER --prompts FILE.jsonl --metrics FILE.jsonl --steps N
"""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl_parts import GenerationClock, boxed_reward

LR_POLICY, LR_VALUE = 1e-4, 3e-4


class RuleRewardModel(nn.Module):
    """A "reward model" that is a rule: 1 where the last boxed integer of an answer is right, else 0.

    TRL calls the backbone on the tokens, `score` on its last hidden states, and takes the value at an answer's last
    token. So the backbone returns the reward of a row at each of its tokens, and `score` gives it back.

    Args:
        tokenizer: decodes the rows.
        answers: right answer of each prompt, by the prompt as text.
    """

    base_model_prefix = "rule"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]):
        super().__init__()
        self.rule = _Rule(tokenizer, answers)
        self.score = nn.Identity()


class _Rule(nn.Module):
    """Computes the rewards; see `RuleRewardModel`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]):
        super().__init__()
        self._tokenizer = tokenizer
        self._answers = answers
        self._opening = torch.tensor(tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
        self._lengths: list[int] = []
        self._num_tokens = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        """Return the reward of each row at each of its tokens, as "hidden states" `[B, T, 1]`."""
        rewards = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            row = ids[mask.bool()]
            opens = (row.unfold(0, len(self._opening), 1) == self._opening.to(row.device)).all(1)
            start = int(opens.nonzero()[0]) + len(self._opening)  # an answer may have the same tokens
            prompt, answer = self._tokenizer.decode(row[:start]), self._tokenizer.decode(row[start:])
            rewards.append(boxed_reward(answer, self._answers[prompt]))
            self._lengths.append(len(row) - start)
        self._num_tokens += int(attention_mask.sum())
        states = torch.tensor(rewards)[:, None, None].expand(*input_ids.shape, 1)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))

    def take_counts(self) -> dict[str, float]:
        """Return mean and largest number of tokens of the answers since the last call, and all tokens so far."""
        lengths, self._lengths = self._lengths, []
        return {
            "mean_gen_tokens": sum(lengths) / len(lengths),
            "max_gen_tokens": max(lengths),
            "num_tokens_so_far": self._num_tokens,
        }


class StepLog(TrainerCallback):
    """Writes a line when a step's metrics are known.

    Args:
        file: output file.
        clock: measures generation.
        rule: has counted the tokens.
    """

    def __init__(self, file: TextIO, clock: GenerationClock, rule: _Rule):
        self._file = file
        self._clock = clock
        self._rule = rule

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a line; TRL calls this at the end of each step."""
        if not logs or "objective/scores" not in logs:
            return
        row = {
            "step": state.global_step,
            "reward": logs["objective/scores"],
            "value_loss": logs["loss/value_avg"],
            "generation_s": self._clock.take(),
            **self._rule.take_counts(),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, dict[str, str]]:
    """Read rows `{"problem", "answer"}`; return the tokens of the prompts, and the right answers by prompt."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokens, answers = [], {}
    for row in rows:
        messages = [{"role": "user", "content": row["problem"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        answers[text] = row["answer"]
    return Dataset.from_dict({"input_ids": tokens}), answers


def training_config(arguments: argparse.Namespace) -> PPOConfig:
    """Return TRL's PPO settings; features that the other side does not use are off."""
    samples = arguments.samples
    return PPOConfig(
        output_dir=str(arguments.metrics.parent / "trl_output"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        # With accumulation over the mini-batches, Accelerate would make one update of all of them.
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_mini_batches=arguments.mini_batches,
        local_rollout_forward_batch_size=samples,
        total_episodes=samples * arguments.steps,
        num_ppo_epochs=arguments.epochs,
        response_length=arguments.max_new_tokens,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.0,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.4,
        gamma=1.0,
        lam=0.95,
        whiten_rewards=False,
        num_sample_generations=0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=arguments.seed,
    )


def optimizers_of(policy: PreTrainedModel, value: PreTrainedModel) -> tuple[Any, Any]:
    """Return AdamW with a learning rate for each model, and a constant schedule."""
    groups: list[dict[str, Any]] = [
        {"params": list(policy.parameters()), "lr": LR_POLICY},
        {"params": list(value.parameters()), "lr": LR_VALUE},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with problem and answer")
    parser.add_argument("--metrics", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="limit of an answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64, help="answers of a step, one for each prompt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mini-batches", type=int, default=2, help="updates of an epoch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")  # prompts of a batch end together
    policy, reference = (AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=1, dtype=torch.float32)
    dataset, answers = read_rows(arguments.prompts, tokenizer)
    reward = RuleRewardModel(tokenizer, answers)
    clock = GenerationClock(policy, "generate")
    with arguments.metrics.open("w", encoding="utf-8") as file:
        trainer = PPOTrainer(
            args=training_config(arguments),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(1)),
            optimizers=optimizers_of(policy, value),
            callbacks=[StepLog(file, clock, reward.rule)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
