"""The older name of `run_grpo.py`; same options, same defaults."""

import sys

from run_grpo import main

if __name__ == "__main__":
    sys.exit(main())
