"""Compare losses and their gradients with TRL's trainers, on the same models and the same rows of tokens.

    uv run python tools/benchmarks/compare_losses_with_trl.py

It makes TRL's environment below `.bench/`, as the other benchmarks do, runs `trl_losses.py` there, and prints a
Markdown table. Both sides run the same Hugging Face model in float32 on one batch; the reference is
examples/assets/tiny-chat, the policy a copy with noise. Invariant: each case is defined once, in `CASES`, with the
options of both sides.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from side_by_side import ROOT, prepare, trl_python
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(ROOT / "tools"))
from tiny_models import make_char_tokenizer  # noqa: E402

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.kto import KTOPreparation
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.projection import shared_tokens
from nemo_rl.algorithms.teaching.span_scores import SameTokens, SpanTeacher, TokenComparison
from nemo_rl.config import ClippedPGLossConfig, DistillationLossConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK, topk_of
from nemo_rl.losses.cross_tokenizer import CrossTokenizerLossFn
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import (
    CentredMargin,
    DPOLossConfig,
    DPOLossFn,
    KTOLossConfig,
    KTOLossFn,
    PreferenceLossFn,
)
from nemo_rl.losses.supervised import DistillationLossFn, NLLLossFn

TINY_CHAT = ROOT / "examples" / "assets" / "tiny-chat"
BETA = 0.3
TEMPERATURE = 2.0
VOCABULARY = 264
NOISE = 0.2
NUM_PAIRS = 8
TOLERANCE = 1e-5
WITHOUT_RATIO = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0}
"""The loss is the advantage times the log-probability, as TRL's; with a ratio only its gradient is the same."""
Row = dict[str, Any]
Batch = BatchedDataDict[Any]
Result = tuple[Tensor, PreTrainedModel]


def dpo_loss(name: str, **options: Any) -> DPOLossFn:
    """Return a preference loss with TRL's beta."""
    defaults = {
        "reference_policy_kl_penalty": BETA,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.0,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
        "preference_loss": name,
    }
    return DPOLossFn(DPOLossConfig(**(defaults | options)))


def kto_loss(**options: float) -> KTOLossFn:
    """Return a KTO loss with TRL's beta."""
    return KTOLossFn(KTOLossConfig(reference_policy_kl_penalty=BETA, **options))


class Side:
    """This library's side: Hugging Face models in float32 and the losses of `nemo_rl.losses`.

    Args:
        work: folder with `policy`, `reference` and `reward_model`.
    """

    def __init__(self, work: Path):
        self.work = work
        self._reference = self.language_model("reference")

    def language_model(self, name: str = "policy") -> PreTrainedModel:
        """Load a model in float32."""
        return AutoModelForCausalLM.from_pretrained(self.work / name, dtype=torch.float32)

    def logprobs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return the log-probabilities of tokens 1..T-1, `[B, T-1]`."""
        ids = batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=attention_mask(batch)).logits[:, :-1]
        return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Return the reference's log-probabilities in a batch's layout, `[B, T]`."""
        with torch.no_grad():
            return torch.nn.functional.pad(self.logprobs(self._reference, batch), (1, 0))

    def on_logprobs(self, loss_fn: Any, rows: list[Row], with_reference: bool = True) -> Result:
        """Compute a loss on log-probabilities of pairs, or of chosen answers alone."""
        batch = pairs_batch(rows) if loss_fn.rows_per_unit == 2 else chosen_batch(rows)
        reference = self.reference_logprobs(batch)
        batch["reference_policy_logprobs"] = reference if with_reference else torch.zeros_like(reference)
        model = self.language_model()
        return call(loss_fn, self.logprobs(model, batch), batch), model

    def without_reference(self, loss_fn: Any, rows: list[Row]) -> Result:
        """Compute a loss as if the reference gave every token probability 1."""
        return self.on_logprobs(loss_fn, rows, with_reference=False)

    def on_feedback(self, loss_fn: Any, rows: list[Row]) -> Result:
        """Compute KTO on labelled answers; the rows are reversed, since TRL pairs a prompt with the previous answer."""
        rows = rows[::-1]
        batch = make_batch([row["prompt"] for row in rows], [row["answer"] for row in rows])
        batch["desirable"] = torch.tensor([float(row["desirable"]) for row in rows])
        model = self.language_model()
        KTOPreparation(Scorer(self, model), max_length=1024).prepare(batch)
        assert batch["kl_baseline"][0] > 0, "a baseline of 0 would hide how it is computed"
        return call(loss_fn, self.logprobs(model, batch), batch), model

    def on_scores(self, loss_fn: Any, rows: list[Row]) -> Result:
        """Compute a reward model's loss."""
        batch = pairs_batch(rows)
        if "margin" in rows[0]:
            batch["margin"] = torch.tensor([row["margin"] for row in rows]).repeat_interleave(2)
        model = AutoModelForSequenceClassification.from_pretrained(self.work / "reward_model", dtype=torch.float32)
        scores = model(input_ids=batch["input_ids"], attention_mask=attention_mask(batch)).logits
        return call(loss_fn, scores, batch), model

    def on_distributions(self, loss_fn: DistillationLossFn, rows: list[Row]) -> Result:
        """Compute distillation from the reference, with the whole vocabulary as its top-k."""
        batch = chosen_batch(rows)
        model = self.language_model()
        with torch.no_grad():
            teacher = distributions(self._reference, batch)
        return loss_fn(distributions(model, batch), teacher, None, data=batch, **denominators(batch))[0], model

    def with_hints(self, loss_fn: Any, rows: list[Row]) -> Result:
        """Compute self-distillation: the teacher is the policy, which reads the rejected answer before the prompt."""
        batch, model = chosen_batch(rows), self.language_model()
        hinted = make_batch([row["rejected"] + row["prompt"] for row in rows], [row["chosen"] for row in rows])
        length = len(rows[0]["rejected"])
        if isinstance(loss_fn, DistillationLossFn):
            with torch.no_grad():
                teacher = distributions(model, hinted)[:, length:]
            return loss_fn(distributions(model, batch), teacher, None, data=batch, **denominators(batch))[0], model
        logprobs = self.logprobs(model, batch)
        with torch.no_grad():
            scores = {
                "logprobs_teacher": self.logprobs(model, hinted)[:, length:],
                "logprobs_policy": logprobs.detach(),
            }
        of_tokens: Any = {name: torch.nn.functional.pad(each, (1, 0)) for name, each in scores.items()}
        estimator = make_advantage_estimator(GRPOConfig.build(adv_estimator={"name": "opd"}), loss_fn.cfg)
        batch["advantages"] = estimator.compute_advantage(
            None, torch.zeros(len(rows)), batch["token_mask"], **of_tokens
        )
        batch["prev_logprobs"] = batch["generation_logprobs"] = of_tokens["logprobs_policy"]
        return call(loss_fn, logprobs, batch), model

    def on_outcomes(self, loss_fn: CrossTokenizerLossFn, rows: list[Row], teacher: str = "reference") -> Result:
        """Compute distillation over two vocabularies, which are compared as a whole.

        Args:
            teacher: Folder of the teacher's tokenizer. Its weights are those of the reference.
        """
        batch, model = chosen_batch(rows), self.language_model()
        tokenizers = (AutoTokenizer.from_pretrained(self.work / name) for name in ("policy", teacher))
        comparison = TokenComparison(shared_tokens(*tokenizers), VOCABULARY, VOCABULARY, False, TEMPERATURE)
        models: Any = (Predictor(model), Predictor(self._reference))
        SpanTeacher(*models, "teacher", None, SameTokens(), comparison).apply(StepBatch(batch))
        logits = model(input_ids=batch["input_ids"], attention_mask=attention_mask(batch)).logits[:, :-1] / TEMPERATURE
        student = torch.log_softmax(logits, dim=-1).gather(-1, batch["candidate_ids"][:, :-1])
        return call(loss_fn, student, batch), model


@dataclass(frozen=True)
class Predictor:
    """The method of a model that `SpanTeacher` needs for spans of one token."""

    model: PreTrainedModel

    @torch.no_grad()
    def get_topk_logits(self, batch: Batch, k: int, *, vocab_size: int, temperature: float) -> dict[str, Tensor]:
        """Return the log-probabilities of the most likely tokens after each token."""
        logits = self.model(input_ids=batch["input_ids"]).logits
        values, ids = topk_of(logits.flatten(0, 1), TopK(k, vocab_size, temperature))
        shape = (*batch["input_ids"].shape, k)
        return {"topk_logits": values.view(shape), "topk_indices": ids.view(shape)}


@dataclass(frozen=True)
class Scorer:
    """The methods of a policy that `KTOPreparation` needs."""

    side: Side
    model: PreTrainedModel

    def get_logprobs(self, batch: Batch) -> dict[str, Tensor]:
        """Score the batch with the policy."""
        with torch.no_grad():
            return {"logprobs": torch.nn.functional.pad(self.side.logprobs(self.model, batch), (1, 0))}

    def get_reference_policy_logprobs(self, batch: Batch) -> dict[str, Tensor]:
        """Score the batch with the reference."""
        return {"reference_logprobs": self.side.reference_logprobs(batch)}


@dataclass(frozen=True)
class Case:
    """One loss on both sides.

    Attributes:
        name: name in the table.
        trainer: name of TRL's class.
        options: options of TRL's configuration.
        own: function that computes the loss on this side.
        loss_fn: the loss of this side.
        rows: name of the rows, a key of `make_rows`.
        note: condition under which the two are comparable.
    """

    name: str
    trainer: str
    options: dict[str, Any]
    own: Callable[[Side, Any, list[Row]], Result]
    loss_fn: Any
    rows: str = "pairs"
    note: str = field(default="")


def _gold(name: str, matched: float, beta: float, loss: CrossTokenizerLossFn, teacher: str = "reference") -> Case:
    options = {
        "beta": beta,
        "uld_hybrid_matched_weight": matched,
        "uld_hybrid_unmatched_weight": 1.0 - matched,
        "uld_student_temperature": TEMPERATURE,
        "uld_teacher_temperature": TEMPERATURE,
        "teacher": teacher,
    }
    note = f"temperature {TEMPERATURE:g}: TRL raises probabilities to at least 1e-8; answers of equal length"
    return Case(name, "ULDLoss", options, partial(Side.on_outcomes, teacher=teacher), loss, "equal", note)


def gold_loss(kind: str = "forward", **options: float) -> CrossTokenizerLossFn:
    """Return a loss over two vocabularies."""
    return CrossTokenizerLossFn(DistillationLossConfig.build(kl_type=kind, **options))


def _dpo(name: str, options: dict[str, Any], loss_fn: DPOLossFn, rows: str = "pairs", note: str = "") -> Case:
    return Case(name, "DPOTrainer", {"beta": BETA} | options, Side.on_logprobs, loss_fn, rows, note)


def _sdpo(name: str, mode: str, alpha: float, loss: Any) -> Case:
    options = {"distillation_mode": mode, "distillation_alpha": alpha}
    note = "the teacher is the policy with a hint; answers of equal length: TRL weights answers equally"
    return Case(f"self-distillation, {name}", "SDPOTrainer", options, Side.with_hints, loss, "equal", note)


def divergence(kind: str, weight: float = 0.5) -> DistillationLossFn:
    """Return a loss over the vocabulary."""
    return DistillationLossFn(DistillationLossConfig.build(kl_type=kind, mixed_kl_weight=weight))


CASES = [
    Case("SFT", "SFTTrainer", {}, Side.on_logprobs, NLLLossFn()),
    _dpo("DPO sigmoid", {"loss_type": ["sigmoid"]}, dpo_loss("sigmoid")),
    _dpo(
        "DPO sigmoid, averaged",
        {"loss_type": ["sigmoid_norm"]},
        dpo_loss("sigmoid", preference_average_log_probs=True),
        note="TRL: `sigmoid_norm`",
    ),
    Case(
        "DPO sigmoid, label smoothing 0.1",
        "CPOTrainer",
        {"beta": BETA, "loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.0},
        Side.without_reference,
        dpo_loss("sigmoid", label_smoothing=0.1),
        note="TRL has it in CPO; reference log-probabilities 0",
    ),
    _dpo("robust, 0.1", {"loss_type": ["robust"], "label_smoothing": 0.1}, dpo_loss("robust", label_smoothing=0.1)),
    _dpo("hinge", {"loss_type": ["hinge"]}, dpo_loss("hinge")),
    _dpo("IPO", {"loss_type": ["ipo"]}, dpo_loss("ipo")),
    _dpo(
        "RPO, alpha 0.7",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        dpo_loss("rpo", sft_loss_weight=0.7),
        rows="equal",
        note="answers of equal length: TRL's likelihood weights answers by length, nemo_rl weights all equally",
    ),
    Case(
        "SimPO, gamma 0.5",
        "CPOTrainer",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        Side.on_logprobs,
        dpo_loss("simpo", reference_policy_kl_penalty=2.0, target_margin=0.5),
    ),
    Case(
        "ORPO",
        "ORPOTrainer",
        {"beta": BETA},
        Side.on_logprobs,
        dpo_loss("orpo", sft_loss_weight=1.0),
        rows="bare",
        note="prompts of one token, answers of equal length: TRL's likelihood counts the prompt too",
    ),
    Case("KTO", "KTOTrainer", {"beta": BETA}, Side.on_feedback, kto_loss(), "feedback"),
    Case(
        "KTO, weights 1.3 and 0.7",
        "KTOTrainer",
        {"beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        Side.on_feedback,
        kto_loss(desirable_weight=1.3, undesirable_weight=0.7),
        "feedback",
    ),
    Case("reward model", "RewardTrainer", {}, Side.on_scores, PreferenceLossFn()),
    Case("reward model, margins of pairs", "RewardTrainer", {}, Side.on_scores, PreferenceLossFn(), "margins"),
    Case(
        "reward model, centring 0.1",
        "RewardTrainer",
        {"center_rewards_coefficient": 0.1},
        Side.on_scores,
        PreferenceLossFn(CentredMargin(0.0, 0.1)),
    ),
    Case(
        "distillation, forward KL",
        "GKDTrainer",
        {"beta": 0.0},
        Side.on_distributions,
        DistillationLossFn(DistillationLossConfig.build(kl_type="forward")),
        note="k is the whole vocabulary",
    ),
    Case(
        "distillation, reverse KL",
        "GKDTrainer",
        {"beta": 1.0},
        Side.on_distributions,
        DistillationLossFn(DistillationLossConfig.build(kl_type="reverse")),
        note="k is the whole vocabulary",
    ),
    _gold("GOLD, forward KL of shared tokens", 1.0, 0.0, gold_loss("forward")),
    _gold("GOLD, reverse KL of shared tokens", 1.0, 1.0, gold_loss("reverse")),
    _gold("GOLD, Jensen-Shannon 0.3", 1.0, 0.3, gold_loss("jensen_shannon", mixed_kl_weight=0.3)),
    _gold("GOLD, sorted tokens of one side", 0.0, 0.0, gold_loss(kl_loss_weight=0.0), teacher="other"),
    _sdpo("sampled tokens", "sampled_token", 1.0, ClippedPGLossFn(ClippedPGLossConfig.build(**WITHOUT_RATIO))),
    _sdpo("forward KL", "full_logits", 0.0, divergence("forward")),
    _sdpo("reverse KL", "full_logits", 1.0, divergence("reverse")),
    _sdpo("Jensen-Shannon 0.3", "full_logits", 0.3, divergence("jensen_shannon", 0.3)),
]


def distributions(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the log-probabilities of all tokens at positions 1..T-1, `[B, T-1, V]`."""
    logits = model(input_ids=batch["input_ids"], attention_mask=attention_mask(batch)).logits
    return torch.log_softmax(logits[:, :-1], dim=-1)


def attention_mask(batch: Batch) -> Tensor:
    """Return `[B, T]` int64, 1 up to each row's length."""
    return (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()


def make_batch(prompts: list[list[int]], answers: list[list[int]]) -> Batch:
    """Build a training batch in which the answers count in the loss."""
    ids = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [torch.tensor([0.0] * len(p) + [1.0] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    padding = AutoTokenizer.from_pretrained(TINY_CHAT).pad_token_id
    return BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding),
        token_mask=torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        input_lengths=torch.tensor([len(row) for row in ids]),
        sample_mask=torch.ones(len(ids)),
    )


def pairs_batch(rows: list[Row]) -> Batch:
    """Build a batch in which chosen and rejected answers alternate."""
    answers = [row[kind] for row in rows for kind in ("chosen", "rejected")]
    return make_batch([row["prompt"] for row in rows for _ in range(2)], answers)


def chosen_batch(rows: list[Row]) -> Batch:
    """Build a batch of the chosen answers."""
    return make_batch([row["prompt"] for row in rows], [row["chosen"] for row in rows])


def denominators(batch: Batch) -> dict[str, Tensor]:
    """Return the global denominators of a batch that is a whole update."""
    return {"global_valid_seqs": batch["sample_mask"].sum(), "global_valid_toks": batch["token_mask"][:, 1:].sum()}


def call(loss_fn: Any, model_output: Tensor, batch: Batch) -> Tensor:
    """Compute the loss of a batch that is a whole update."""
    return loss_fn(model_output, data=batch, **denominators(batch))[0]


def make_rows(seed: int = 0) -> dict[str, list[Row]]:
    """Return rows of random tokens by name, each as lists of token ids."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(rng.randint(low, high))]

    def pair(prompt: tuple[int, int], answer: tuple[int, int]) -> Row:
        return {"prompt": tokens(*prompt), "chosen": tokens(*answer), "rejected": tokens(*answer)}

    pairs = [pair((4, 12), (2, 20)) for _ in range(NUM_PAIRS)]
    return {
        "pairs": pairs,
        "equal": [pair((4, 12), (9, 9)) for _ in range(NUM_PAIRS)],
        "bare": [pair((1, 1), (9, 9)) for _ in range(NUM_PAIRS)],
        "margins": [row | {"margin": rng.uniform(0, 2)} for row in pairs],
        "feedback": [
            {"prompt": tokens(4, 12), "answer": tokens(2, 20), "desirable": number % 3 != 0}
            for number in range(NUM_PAIRS)
        ],
    }


def write_inputs(work: Path, rows: dict[str, list[Row]]) -> None:
    """Write models, rows and cases for both sides."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32)
    model.save_pretrained(work / "reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(work / "policy")
    scoring = AutoModelForSequenceClassification.from_pretrained(
        work / "policy", num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    scoring.save_pretrained(work / "reward_model")
    for name in ("policy", "reference", "reward_model"):
        tokenizer.save_pretrained(work / name)
    names = [f"<|other_{index}|>" for index in range(VOCABULARY - 256 - 3)]
    make_char_tokenizer(extra_tokens=names).save_pretrained(work / "other")
    (work / "rows.json").write_text(json.dumps(rows))
    cases = [{"trainer": case.trainer, "options": case.options, "rows": case.rows} for case in CASES]
    (work / "cases.json").write_text(json.dumps(cases))


def compare(work: Path, rows: dict[str, list[Row]]) -> list[tuple[Case, float, float, float]]:
    """Return case, TRL's loss, and the relative differences of the losses and of the gradients.

    The gradients' difference is the largest over all weights, relative to TRL's largest gradient.
    """
    side, results = Side(work), []
    theirs = json.loads((work / "trl.json").read_text())
    for number, (case, their_loss) in enumerate(zip(CASES, theirs, strict=True)):
        loss, model = case.own(side, case.loss_fn, rows[case.rows])
        loss.backward()
        expected = load_file(work / f"gradients_{number}.safetensors")
        own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if own.keys() != expected.keys():
            raise SystemExit(f"{case.name}: gradients of different weights: {own.keys() ^ expected.keys()}")
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        error = max(float((own[name] - expected[name]).abs().max()) for name in own)
        results.append((case, their_loss, abs(loss.item() - their_loss) / abs(their_loss), error / largest))
    return results


def main() -> int:
    """Print the table; return 0 if all differences are within the tolerance, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    prepare()
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_inputs(work, rows)
        script = Path(__file__).with_name("trl_losses.py")
        subprocess.run([str(trl_python()), str(script), "--work", folder], check=True, stdout=sys.stderr)
        results = compare(work, rows)
    print("| loss | TRL | TRL's value | loss, relative difference | gradient, relative difference | |")
    print("|---|---|---:|---:|---:|---|")
    for case, value, loss, gradient in results:
        print(f"| {case.name} | {case.trainer} | {value:.6f} | {loss:.1e} | {gradient:.1e} | {case.note} |")
    worst = max(max(loss, gradient) for _, _, loss, gradient in results)
    print(f"\nLargest difference: {worst:.1e}.")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
