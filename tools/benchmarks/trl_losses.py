"""Compute TRL's side of `compare_losses_with_trl.py`: its trainers' losses and gradients on given rows of tokens.

It runs with the Python of TRL's environment, where nemo_rl is not installed, and uses TRL's public interface only: it
makes a trainer, passes the rows to its collator, and differentiates `compute_loss`. It writes one safetensors file of
gradients per case, and `trl.json` with the losses.

    python trl_losses.py --work FOLDER
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdpo.loss_utils import (
    compute_full_logit_self_distillation_loss,
    compute_sampled_token_self_distillation_loss,
)

Row = dict[str, Any]
IGNORED = -100


class Side:
    """Models, tokenizer and settings of all cases.

    Args:
        work: folder with `policy`, `reference` and `reward_model`.
    """

    def __init__(self, work: Path):
        self.work = work
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(work / "policy")
        self.settings = {
            "output_dir": str(work / "trl_output"),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
        }

    def language_model(self, name: str) -> PreTrainedModel:
        """Load a model in float32."""
        return AutoModelForCausalLM.from_pretrained(self.work / name, dtype=torch.float32)

    def common(self, **texts: list[Any]) -> dict[str, Any]:
        """Return the arguments of every trainer; a data set of texts is required but not used."""
        return {"processing_class": self.tokenizer, "train_dataset": Dataset.from_dict(texts)}


def sft(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute SFTTrainer's loss on prompts and chosen answers; the prompt does not count."""
    model = side.language_model("policy")
    trainer = SFTTrainer(model, args=SFTConfig(**side.settings, **options), **side.common(text=["1+1=2"]))
    examples = [
        {"input_ids": r["prompt"] + r["chosen"], "labels": [IGNORED] * len(r["prompt"]) + r["chosen"]} for r in rows
    ]
    return trainer.compute_loss(model, trainer.data_collator(examples)), model


def dpo(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute DPOTrainer's loss with a separate reference model."""
    model = side.language_model("policy")
    trainer = DPOTrainer(
        model,
        ref_model=side.language_model("reference"),
        args=DPOConfig(**side.settings, **options),
        **side.common(prompt=["1+1="], chosen=["2"], rejected=["3"]),
    )
    examples = [{"prompt_ids": r["prompt"], "chosen_ids": r["chosen"], "rejected_ids": r["rejected"]} for r in rows]
    return trainer.compute_loss(model, trainer.data_collator(examples)), model


def reward(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute RewardTrainer's loss; rows may have margins."""
    model = AutoModelForSequenceClassification.from_pretrained(side.work / "reward_model", dtype=torch.float32)
    trainer = RewardTrainer(
        model, args=RewardConfig(**side.settings, **options), **side.common(chosen=["1+1=2"], rejected=["1+1=3"])
    )
    examples = [
        {
            "chosen_ids": r["prompt"] + r["chosen"],
            "rejected_ids": r["prompt"] + r["rejected"],
            **({"margin": r["margin"]} if "margin" in r else {}),
        }
        for r in rows
    ]
    return trainer.compute_loss(model, trainer.data_collator(examples)), model


def kto(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute KTOTrainer's loss on rows with one answer; the mismatched answer is that of the previous row."""
    model = side.language_model("policy")
    trainer = KTOTrainer(
        model,
        ref_model=side.language_model("reference"),
        args=KTOConfig(**side.settings, per_device_train_batch_size=2, **options),
        **side.common(prompt=["1+1=", "1+2="], completion=["2", "2"], label=[True, False]),
    )
    examples = [
        {
            "prompt_ids": row["prompt"],
            "completion_ids": row["answer"],
            "KL_completion_ids": rows[position - 1]["answer"],
            "label": row["desirable"],
        }
        for position, row in enumerate(rows)
    ]
    return trainer.compute_loss(model, trainer.data_collator(examples)), model


def cpo(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute CPOTrainer's loss: preferences without a reference, including SimPO."""
    return _without_reference(CPOTrainer, CPOConfig, side, rows, options)


def orpo(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute ORPOTrainer's loss."""
    return _without_reference(ORPOTrainer, ORPOConfig, side, rows, options)


def _without_reference(
    trainer_class: type, config_class: type, side: Side, rows: list[Row], options: dict[str, Any]
) -> tuple[Tensor, PreTrainedModel]:
    model = side.language_model("policy")
    trainer = trainer_class(
        model,
        args=config_class(**side.settings, **options),
        **side.common(prompt=["1+1="], chosen=["2"], rejected=["3"]),
    )
    batch: dict[str, Tensor] = {}
    for kind in ("chosen", "rejected"):
        ids = [torch.tensor(row["prompt"] + row[kind]) for row in rows]
        labels = [torch.tensor([IGNORED] * len(row["prompt"]) + row[kind]) for row in rows]
        padding = side.tokenizer.pad_token_id
        batch[f"{kind}_input_ids"] = pad_sequence(ids, batch_first=True, padding_value=padding)
        batch[f"{kind}_attention_mask"] = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        batch[f"{kind}_labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return trainer.compute_loss(model, batch), model


def gkd(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute GKDTrainer's loss; the reference is the teacher."""
    model, teacher = side.language_model("policy"), side.language_model("reference")
    ids = [torch.tensor(row["prompt"] + row["chosen"]) for row in rows]
    labels = [torch.tensor([IGNORED] * len(row["prompt"]) + row["chosen"]) for row in rows]
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=side.tokenizer.pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
    }
    targets = pad_sequence(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
    with torch.no_grad():
        teacher_logits = teacher(**inputs).logits[:, :-1]
    return GKDTrainer.generalized_jsd_loss(model(**inputs).logits[:, :-1], teacher_logits, targets, **options), model


def gold(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute GOLD's loss over two vocabularies; each token of an answer is a group of its own on both sides."""
    model, teacher = side.language_model("policy"), side.language_model("reference")
    config = GOLDConfig(
        **side.settings,
        use_uld_loss=True,
        use_extended_uld=False,
        uld_use_hybrid_loss=True,
        uld_token_merge_strategy="bayesian",
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        **{name: value for name, value in options.items() if name != "teacher"},
    )
    ids = [torch.tensor(row["prompt"] + row["chosen"]) for row in rows]
    labels = [torch.tensor([IGNORED] * len(row["prompt"]) + row["chosen"]) for row in rows]
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=side.tokenizer.pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
    }
    targets = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    with torch.no_grad():
        teacher_logits = teacher(**inputs).logits
    other = AutoTokenizer.from_pretrained(side.work / options["teacher"])
    loss = ULDLoss(config, side.tokenizer, other)
    tokens = (targets, targets, inputs["input_ids"], inputs["input_ids"])
    return loss(model(**inputs).logits, teacher_logits, *tokens), model


def sdpo(side: Side, rows: list[Row], options: dict[str, Any]) -> tuple[Tensor, PreTrainedModel]:
    """Compute the loss of SDPO's self-distillation: the teacher is the policy, which reads a hint before the prompt.

    Answers have one length. The hint is the rejected answer.
    """
    model = side.language_model("policy")
    answers = torch.tensor([row["chosen"] for row in rows])
    with torch.no_grad():
        teacher = torch.stack([_predictions(model, row["rejected"] + row["prompt"], row["chosen"]) for row in rows])
    student = torch.stack([_predictions(model, row["prompt"], row["chosen"]) for row in rows])
    alpha = options["distillation_alpha"]
    if options["distillation_mode"] == "sampled_token":
        loss = compute_sampled_token_self_distillation_loss(student, teacher, answers, distillation_alpha=alpha)
    else:
        loss = compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
    return loss.mean(-1).mean(), model


def _predictions(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the logits that predict each token of an answer, `[T, V]`."""
    return model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]


TRAINERS: dict[str, Callable[..., tuple[Tensor, PreTrainedModel]]] = {
    "SFTTrainer": sft,
    "DPOTrainer": dpo,
    "RewardTrainer": reward,
    "KTOTrainer": kto,
    "CPOTrainer": cpo,
    "ORPOTrainer": orpo,
    "GKDTrainer": gkd,
    "ULDLoss": gold,
    "SDPOTrainer": sdpo,
}


def main() -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with cases.json, rows.json and models")
    work = parser.parse_args().work
    torch.set_num_threads(1)
    side = Side(work)
    rows = json.loads((work / "rows.json").read_text())
    losses = []
    for number, case in enumerate(json.loads((work / "cases.json").read_text())):
        loss, model = TRAINERS[case["trainer"]](side, rows[case["rows"]], case["options"])
        loss.backward()
        gradients = {name: p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None}
        save_file(gradients, work / f"gradients_{number}.safetensors")
        losses.append(loss.item())
    (work / "trl.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
