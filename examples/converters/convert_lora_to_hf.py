"""Merge a LoRA adapter into its base model and write a Hugging Face folder.

    uv run examples/converters/convert_lora_to_hf.py --adapter-ckpt results/grpo/step_10 \
        --hf-ckpt-path results/grpo/hf [--base-ckpt FOLDER] [--hf-model-name NAME] [--verify]

The folder loads with `transformers` and vLLM. The adapter may come from this library (a step folder) or from PEFT; it
names its base model itself. --verify reloads the folder and compares its log-probabilities with those of the base model
with the unmerged adapter; the exit status is 1 when float32 weights differ by more than 1e-4.
"""

import argparse
import sys
from pathlib import Path

from nemo_rl.launch.command_line import exit_status


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter-ckpt", type=Path, required=True, help="step folder, or the adapter's own folder")
    parser.add_argument("--base-ckpt", help="base model, or a step folder of full training; else the adapter's own")
    parser.add_argument("--hf-model-name", help="model whose tokenizer is used, and base model without --base-ckpt")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="new folder for the exported model")
    parser.add_argument("--adapter-only", action="store_true", help="write the adapter in PEFT's format, unmerged")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="number format; default float32")
    parser.add_argument("--verify", action="store_true", help="reload and compare log-probabilities")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code in the folder of the base model")
    options = parser.parse_args(arguments)
    if options.adapter_only and (options.verify or options.dtype):
        parser.error("--adapter-only copies the adapter as it is: leave --dtype and --verify out")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Export the model and return the exit status."""
    options = parse_arguments(arguments)
    return exit_status(lambda: convert(options))


def convert(options: argparse.Namespace) -> int:
    """Export with the options of the command line; return 1 if the export differs from the trained model."""
    # Imported here so that --help does not wait for torch.
    from nemo_rl.files.trusted_code import trust_code
    from nemo_rl.models.dtensor.checkpoints.lora_export import (
        adapter_source,
        export_adapter,
        export_merged,
        verify_merged,
    )

    source = adapter_source(options.adapter_ckpt, options.base_ckpt, options.hf_model_name)
    if options.trust_remote_code:
        trust_code("--base-ckpt", source.base)
        trust_code("--hf-model-name", source.tokenizer)
    if options.adapter_only:
        export_adapter(source, options.hf_ckpt_path)
    else:
        export_merged(source, options.hf_ckpt_path, options.dtype)
    print(f"Exported to {options.hf_ckpt_path}")
    if not options.verify:
        return 0
    check = verify_merged(source, options.hf_ckpt_path)
    print(check)
    return 0 if check.holds_for(options.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
