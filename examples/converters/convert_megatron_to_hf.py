"""Export a Megatron Core checkpoint as a Hugging Face folder.

    uv run examples/converters/convert_megatron_to_hf.py --config results/grpo/step_10/config.yaml \
        --megatron-ckpt-path results/grpo/step_10/policy/weights --hf-ckpt-path results/grpo/hf [--verify]

`convert_dcp_to_hf.py` under the names of Megatron's checkpoints. Needs neither a GPU nor the processes of the run.
"""

import argparse
import logging
import sys
from pathlib import Path

from convert_dcp_to_hf import convert

from nemo_rl.algorithms.runtime.launch import exit_status
from nemo_rl.utils.logging_setup import configure_logging

logger = logging.getLogger(__name__)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.yaml of the step folder; found by itself there")
    parser.add_argument(
        "--megatron-ckpt-path", dest="dcp_ckpt_path", type=Path, required=True, help="step folder or its policy/weights"
    )
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="new folder for the exported model")
    parser.add_argument("--hf-model-name", help="model whose tokenizer is used; else that of the configuration")
    parser.add_argument("--no-strict", action="store_true", help="accepted, no effect: every tensor has to fit")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="number format; as it is if absent")
    parser.add_argument("--verify", action="store_true", help="reload and compare log-probabilities")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Export; returns the exit status."""
    configure_logging()
    options = parse_arguments(arguments)
    if options.no_strict:
        logger.warning("--no-strict has no effect: a checkpoint that lacks a tensor, or has one more, is not exported.")
    return exit_status(lambda: convert(options, options.hf_model_name))


if __name__ == "__main__":
    sys.exit(main())
