r"""Print what a model can do that a run did not train: its loss on plain text, and word problems.

uv run --extra cpu python examples/use_cases/held_out.py models/SmolLM2-135M-Instruct results/instructions_hf

The text is the license and the README of the library; the problems are those of `word_problems.py`, answered greedily.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from word_problems import make_rows, right

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (ROOT / "LICENSE", ROOT / "README.md")


@torch.no_grad()
def text_loss(model: torch.nn.Module, tokenizer: AutoTokenizer, block: int = 512) -> float:
    """Return the mean cross entropy per token of both texts, in nats, read in blocks."""
    losses: list[float] = []
    for path in TEXTS:
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        for rows in ids.split(block):
            if len(rows) > 1:
                log_probs = model(rows[None, :-1]).logits[0].log_softmax(-1)
                losses += (-log_probs.gather(-1, rows[1:, None])[:, 0]).tolist()
    return sum(losses) / len(losses)


@torch.no_grad()
def problems_solved(model: torch.nn.Module, tokenizer: AutoTokenizer, num_rows: int = 60) -> float:
    """Return the fraction of word problems whose greedy answer is right."""
    rows = make_rows(num_rows, 1, seed=1)
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    answers = model.generate(**prompts, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(right(text, row) for text, row in zip(texts, rows, strict=True)) / num_rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description="Check what a run did not train.")
    parser.add_argument("models", nargs="+")
    for name in parser.parse_args(arguments).models:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        loss, solved = text_loss(model, tokenizer), problems_solved(model, tokenizer)
        print(f"{name}: loss on plain text {loss:.3f}, word problems {solved:.3f}")


if __name__ == "__main__":
    main()
