"""Export a Megatron Core checkpoint as a Hugging Face folder.

    uv run examples/converters/convert_megatron_to_hf.py --config results/grpo/step_10/config.yaml \
        --megatron-ckpt-path results/grpo/step_10/policy/weights --hf-ckpt-path results/grpo/hf [--verify]

It is `convert_dcp_to_hf.py` with NeMo RL's option names for Megatron checkpoints. It needs neither a GPU nor the
processes of the run.
"""

import argparse
import logging
import sys

from convert_dcp_to_hf import convert, export_parser

from nemo_rl.launch.command_line import exit_status

logger = logging.getLogger(__name__)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = export_parser(__doc__, "--megatron-ckpt-path")
    parser.add_argument("--hf-model-name", help="model whose tokenizer is used; else that of the configuration")
    parser.add_argument("--no-strict", action="store_true", help="accepted, no effect: every tensor has to fit")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Export the checkpoint and return the exit status."""
    options = parse_arguments(arguments)
    if options.no_strict:
        logger.warning("--no-strict has no effect: a checkpoint with a missing or an extra tensor is not exported.")
    return exit_status(lambda: convert(options, options.hf_model_name))


if __name__ == "__main__":
    sys.exit(main())
