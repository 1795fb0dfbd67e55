"""Write a Hugging Face model as a Megatron Core checkpoint, to inspect it or to start from it.

    uv run --extra mcore examples/converters/import_hf_to_megatron.py --hf-model-name Qwen/Qwen3-1.7B \
        --megatron-ckpt-path results/qwen3-1.7b [--dtype bfloat16]

The folder is a step folder without optimizer state: `Policy(weights_path="results/qwen3-1.7b/policy/weights")` starts
from it on any mesh, and `convert_megatron_to_hf.py` converts it back. One process without a GPU reads one tensor at a
time. Runs do not need this checkpoint: every rank reads its part of the Hugging Face files.
"""

import argparse
import sys
from pathlib import Path

from nemo_rl.launch.command_line import exit_status


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-model-name", required=True, help="hub id or local folder")
    parser.add_argument("--megatron-ckpt-path", type=Path, required=True, help="new folder for the checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="number format; default: unchanged")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Import the model and return the exit status."""
    options = parse_arguments(arguments)
    return exit_status(lambda: convert(options))


def convert(options: argparse.Namespace) -> int:
    """Import with the options of the command line."""
    from nemo_rl.models.megatron.release import require_megatron_core

    require_megatron_core("import_hf_to_megatron.py")
    # Imported here so that --help does not wait for torch.
    from nemo_rl.models.megatron.checkpoints.folder_import import import_huggingface

    count = import_huggingface(options.hf_model_name, options.megatron_ckpt_path, options.dtype)
    print(f"Imported {count} tensors to {options.megatron_ckpt_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
