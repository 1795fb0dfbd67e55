"""Put the helpers of the engines' tests on the import path of the tests in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))
