"""Write rows of NeMo Gym for the calculator: products, and their results for the verifier.

python calculator_rows.py FOLDER    writes train.jsonl and validation.jsonl
"""

import json
import sys
from pathlib import Path

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.response_datasets import load_response_dataset

AGENT = {"type": "responses_api_agents", "name": "calculator_agent"}
CALCULATOR = {
    "type": "function",
    "name": "calculator",
    "description": "Calculates the value of an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    "strict": True,
}
NUM_ROWS = {"train": 2000, "validation": 128}


def main(folder: Path) -> None:
    """Write both files; their problems are those of `dataset_name: arithmetic_products`."""
    folder.mkdir(parents=True, exist_ok=True)
    for role, num_rows in NUM_ROWS.items():
        entry = DatasetConfig.build(
            dataset_name="arithmetic_products", min_operand=100, max_operand=999, num_samples=num_rows
        )
        with (folder / f"{role}.jsonl").open("w", encoding="utf-8") as file:
            for row in load_response_dataset(entry, role).dataset:
                request = {"input": [{"role": "user", "content": row["problem"]}], "tools": [CALCULATOR]}
                given = {"responses_create_params": request, "agent_ref": AGENT, "expected_answer": row["answer"]}
                file.write(json.dumps(given) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
