"""Make an untrained tiny chat model whose tokenizer has a token for each two digits, for distillation across tokenizers.

It has the layers of `examples/assets/tiny-chat`. The library trains it on worked sums:

    uv run --extra cpu python tools/make_tiny_pair_model.py --output results/tiny-pairs
    uv run --extra cpu python examples/run_sft.py --config examples/configs/sft_pairs_cpu.yaml
"""

import argparse
from pathlib import Path

import torch
from tiny_models import TinyShape, make_pair_tokenizer, make_tiny_model, save_tiny_checkpoint


def make_pair_model(folder: Path, seed: int = 0) -> None:
    """Write the model to a folder, in bfloat16.

    Args:
        folder: folder to write; created if missing.
        seed: seed of the weights.
    """
    tokenizer = make_pair_tokenizer()
    model = make_tiny_model("qwen2", TinyShape(vocab_size=len(tokenizer)), seed=seed, dtype=torch.bfloat16)
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    save_tiny_checkpoint(folder, model, tokenizer)


def main() -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    arguments = parser.parse_args()
    make_pair_model(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
