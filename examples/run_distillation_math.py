"""Run `run_distillation.py` under its older name, with the same options and defaults."""

import sys

from run_distillation import main

if __name__ == "__main__":
    sys.exit(main())
