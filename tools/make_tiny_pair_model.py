"""Make a tiny chat model with a token for each two digits, from the layers of `examples/assets/tiny-chat`.

It becomes the teacher of a model with other tokens (docs/algorithms/distillation.md). The embedding of two digits is at
first the mean of theirs, so the library's SFT has to teach the model its tokens, and sums:

    uv run --extra cpu python tools/make_tiny_pair_model.py --output results/tiny-pairs
    uv run --extra cpu python examples/run_sft.py --config examples/use_cases/pairs_sft.yaml
"""

import argparse
from pathlib import Path

import torch
from tiny_models import TinyShape, make_char_tokenizer, make_pair_tokenizer, save_tiny_checkpoint, tiny_config
from transformers import AutoModelForCausalLM

START = Path(__file__).parents[1] / "examples/assets/tiny-chat"
SPECIAL = {
    "<|question|>": "<|im_start|>",
    "<|answer|>": "<|im_start|>",
    "<|end|>": "<|im_end|>",
}
"""Special tokens of other names, each with the one of the tiny chat model whose embedding it gets."""


def make_pair_model(folder: Path) -> None:
    """Write the model to a folder, in bfloat16."""
    tokenizer, chars = make_pair_tokenizer(), make_char_tokenizer()
    # # For models of the type qwen2, transformers divides digits whatever the tokenizer says. Llama has equal layers.
    config = tiny_config("llama", TinyShape(vocab_size=len(tokenizer)))
    config.attention_bias = True
    model = AutoModelForCausalLM.from_config(config)
    start = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    weights = start.state_dict()
    known = weights["model.embed_tokens.weight"]
    rows = []
    for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer))):
        names = [SPECIAL[token]] if token in SPECIAL else list(token)
        rows.append(known[chars.convert_tokens_to_ids(names)].mean(0))
    embeddings = {name: torch.stack(rows) for name, value in weights.items() if value.shape == known.shape}
    outputs = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if "o_proj.bias" in name}
    model.load_state_dict(weights | embeddings | outputs)
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    save_tiny_checkpoint(folder, model.to(torch.bfloat16), tokenizer)


def main() -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    make_pair_model(parser.parse_args().output)


if __name__ == "__main__":
    main()
