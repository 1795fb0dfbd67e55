"""Make the file of `teacher.projection_matrix_path`: classes of the tokens of two tokenizers, from their texts.

    uv run --extra cpu python tools/make_projection.py --student examples/assets/tiny-chat \
        --teacher results/tiny-pairs --output results/pairs.safetensors

The file has `indices` [V_student, k] int32, the teacher tokens that stand for the classes of each student token (-1 for
none), `weights` [V_student, k] float32, the share of its probability that each class gets, and `teacher_classes`
[V_teacher] int32, the class of each teacher token.
"""

import argparse
import logging
from pathlib import Path

from nemo_rl.algorithms.teaching.projection import KINDS
from nemo_rl.config import TokenizerConfig
from nemo_rl.data.tokenizer import get_tokenizer

logger = logging.getLogger("make_projection")


def main() -> None:
    """Read the command line and write the file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", required=True, help="hub id or folder of the student's tokenizer")
    parser.add_argument("--teacher", required=True, help="hub id or folder of the teacher's tokenizer")
    parser.add_argument("--kind", choices=KINDS, default="common_beginnings", help="tokens that are in one class")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    student, teacher = (
        get_tokenizer(TokenizerConfig.build(name=name)) for name in (arguments.student, arguments.teacher)
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    KINDS[arguments.kind](student, teacher).save(arguments.output)
    logger.info("%s is written.", arguments.output)


if __name__ == "__main__":
    main()
