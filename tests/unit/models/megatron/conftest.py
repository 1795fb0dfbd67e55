"""The helpers of the tests of models are importable here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
