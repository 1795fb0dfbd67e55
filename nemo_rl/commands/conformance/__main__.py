"""Check engines on the command line and print the table."""

import argparse
import sys
from dataclasses import replace

from nemo_rl.commands.conformance.case import Case
from nemo_rl.commands.conformance.run import ALL, check_engine, table
from nemo_rl.models.generation.interfaces import EngineSettings


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return 1 if a property fails."""
    parser = argparse.ArgumentParser(prog="python -m nemo_rl.commands.conformance", description=__doc__)
    parser.add_argument("backends", nargs="+", help="vllm, hf, megatron, or the dotted path of a class")
    parser.add_argument("--model", required=True, help="local folder of a small model and its tokenizer")
    parser.add_argument("--device", default="cpu", help="of the engine, as in cluster.device")
    parser.add_argument("--precision", default="float32", help="of the engine; the reference computes in float32")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a log-probability")
    parser.add_argument("--zero-mismatch", action="store_true", help="as policy.zero_mismatch, on CPUs")
    parser.add_argument("--only", action="append", choices=ALL, help="property to check; may be repeated")
    given = parser.parse_args(arguments)
    settings = EngineSettings(
        backend="",
        model_name=given.model,
        tokenizer_name=given.model,
        device=given.device,
        precision=given.precision,
        max_model_len=256,
        kv_cache_bytes=64 << 20,
        load_weights=True,
        zero_mismatch=given.zero_mismatch,
    )
    case = Case(given.model, tolerance=given.tolerance)
    names = given.only or tuple(ALL)
    reports = [check_engine(replace(settings, backend=backend), case, names) for backend in given.backends]
    sys.stdout.write(table(reports))
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
