"""Public evaluation data, read completely; collected only with a copy next to the repository (conftest.py)."""

from pathlib import Path

import pytest
from eval_helpers import eval_config, make_prompts

SHARED = Path(__file__).resolve().parents[3] / "../shared/data"
CHOICE = "env.math.verifier_type=english_multichoice"
LONG = ("data.max_input_seq_length=null",)


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("gsm8k", "gsm8k/test.jsonl.gz", 1319),
        ("math500", "math/math500.jsonl.gz", 500),
        ("math", "math/math_test.jsonl.gz", 5000),
        ("mmlu", "mmlu/test.jsonl.gz", 14042),
        ("mmlu_pro", "mmlu_pro/test.jsonl.gz", 12032),
        ("aime2024", "aime/aime24.jsonl.gz", 30),
    ],
)
def test_real_files_are_read_completely(name, file, count) -> None:
    verifier = (CHOICE,) if name.startswith("mmlu") else ()
    overrides = (f"data.dataset_name={name}", f"data.data_path={SHARED / file}", "data.num_samples=null", *LONG)
    prompts = make_prompts(eval_config(*overrides, *verifier))
    assert (len(prompts), prompts.num_bad_rows) == (count, 0)
