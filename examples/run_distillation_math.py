"""The older name of `run_distillation.py`; same options, same defaults."""

import sys

from run_distillation import main

if __name__ == "__main__":
    sys.exit(main())
