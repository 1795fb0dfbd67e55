#!/usr/bin/env bash
# Runs a command as the driver of a run, and notes its process id where stop_run.sh looks for it:
#
#   run_driver.sh python examples/run_grpo.py --config ... key=value ...
set -euo pipefail
echo "$$" >"${NRL_DRIVER_PID_FILE:-/tmp/nemo_rl_driver.pid}"
exec "$@"
