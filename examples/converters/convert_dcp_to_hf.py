"""Export a checkpoint of any training backend as a Hugging Face folder.

    uv run examples/converters/convert_dcp_to_hf.py --config results/grpo/step_10/config.yaml \
        --dcp-ckpt-path results/grpo/step_10/policy/weights --hf-ckpt-path results/grpo/hf [--verify]

The folder loads with `transformers` and vLLM. --verify reloads it and compares log-probabilities with the
checkpoint; the exit status is 1 when float32 weights differ by more than 1e-5.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.launch.command_line import exit_status
from nemo_rl.utils.errors import CheckpointError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    return export_parser(__doc__, "--dcp-ckpt-path").parse_args(arguments)


def export_parser(description: str | None, checkpoint_flag: str) -> argparse.ArgumentParser:
    """Make the parser of an export's command line; `checkpoint_flag` names the option of the checkpoint."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.yaml of the run; default: that of the step folder")
    parser.add_argument(
        checkpoint_flag, dest="dcp_ckpt_path", type=Path, required=True, help="step folder or its policy/weights"
    )
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="new folder for the exported model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="number format; default: unchanged")
    parser.add_argument("--verify", action="store_true", help="reload and compare log-probabilities")
    parser.add_argument("--trust-remote-code", action="store_true", help="with --verify, run code in the checkpoint")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Export the checkpoint and return the exit status."""
    options = parse_arguments(arguments)
    return exit_status(lambda: convert(options))


def convert(options: argparse.Namespace, model_name: str | None = None) -> int:
    """Export with the options of the command line; return 1 if the export differs from the trained model.

    Args:
        options: the command line.
        model_name: model whose tokenizer is used if the checkpoint has none; None uses the configuration's.
    """
    # Imported here so that --help does not wait for torch.
    from nemo_rl.files.trusted_code import trust_code
    from nemo_rl.models.training.backends import backend_of_checkpoint

    backend = backend_of_checkpoint(options.dcp_ckpt_path, options.config)
    weights = backend.find_weights(options.dcp_ckpt_path)
    config = options.config or weights.parents[1] / "config.yaml"
    tokenizer = model_name or tokenizer_name(config, options.config is not None)
    backend.export(weights, options.hf_ckpt_path, tokenizer, options.dtype)
    print(f"Exported to {options.hf_ckpt_path}")
    if not options.verify:
        return 0
    if options.trust_remote_code:
        trust_code("--trust-remote-code", str(options.hf_ckpt_path))
    check = backend.verify_export(weights, options.hf_ckpt_path)
    print(check)
    return 0 if check.holds_for(options.dtype) else 1


def tokenizer_name(config: Path, must_exist: bool) -> str | None:
    """Return `policy.tokenizer.name` (or else `policy.model_name`) of a stored configuration; None without a file.

    Raises:
        CheckpointError: the file does not exist or is not the configuration of a run.
    """
    if not config.exists():
        if must_exist:
            raise CheckpointError(f"--config {str(config)!r} does not exist; step folders have a config.yaml.")
        return None
    content: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
    try:
        policy = content["policy"]
        return str((policy.get("tokenizer") or {}).get("name") or policy["model_name"])
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"--config {str(config)!r} has no policy.model_name.") from error


if __name__ == "__main__":
    sys.exit(main())
