r"""Ask transformers the prompts of a greedy evaluation, and count the answers that are equal to those of the engine.

uv run --extra cpu python examples/use_cases/same_answers.py results/instructions/greedy MODEL

The first folder is the `eval.save_path` of an evaluation with `generation.temperature=0`, MODEL the evaluated model.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the number of equal answers, and both answers where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("model")
    given = parser.parse_args(arguments)
    lines = (given.evaluation / "evaluation_data.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt", add_special_tokens=False)
    most = max(row["response_length"] for row in rows)
    answers = model.generate(**prompts, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    different = [(row["response"], text) for row, text in zip(rows, texts, strict=True) if row["response"] != text]
    print(f"{len(rows) - len(different)} of {len(rows)} answers are equal")
    for engine, plain in different:
        print(f"engine       {engine!r}\ntransformers {plain!r}")


if __name__ == "__main__":
    main()
