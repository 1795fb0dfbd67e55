#!/usr/bin/env bash
# Run a command as the driver of a run, and write its process id to the file that stop_run.sh reads:
#
#   run_driver.sh python examples/run_grpo.py --config ... key=value ...
set -euo pipefail
echo "$$" >"${NRL_DRIVER_PID_FILE:-/tmp/nemo_rl_driver.pid}"
exec "$@"
