#!/usr/bin/env bash
# preStop hook of a Ray pod: the run ends after its step, with a checkpoint, before Kubernetes ends the pod.
#
# Kubernetes signals only the container's first process, which is Ray's; the driver would get no signal and die with
# Ray. On the head this script sends the driver one SIGTERM and waits for it to end. On every pod it then waits until no
# actor of the run is left, because a checkpoint needs all ranks while their pods are also being ended. The pod's
# terminationGracePeriodSeconds limits all of this and must be longer than checkpointing.signal_grace_s.
set -uo pipefail
pid_file="${NRL_DRIVER_PID_FILE:-/tmp/nemo_rl_driver.pid}"

if [[ -s "$pid_file" ]]; then
  driver="$(<"$pid_file")"
  if kill -TERM "$driver" 2>/dev/null; then
    while kill -0 "$driver" 2>/dev/null; do sleep 1; done
    # Every few seconds KubeRay asks the dashboard how the job ended; wait until its submitter has ended.
    sleep "${NRL_LAST_LOOK_S:-20}"
  fi
fi
# Other processes that Ray calls `ray::` are its agents and idle workers.
while pgrep --full --list-full '^ray::' | grep --quiet --invert-match --extended-regexp ' ray::(IDLE|DashboardAgent|RuntimeEnvAgent)'; do
  sleep 1
done
