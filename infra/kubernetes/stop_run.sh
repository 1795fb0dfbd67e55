#!/usr/bin/env bash
# preStop hook of a Ray pod: the run ends behind its step, with a checkpoint, before Kubernetes ends the pod.
#
# Kubernetes signals the container's first process only, which is Ray's; the driver would hear nothing, and die with Ray.
# On the head this sends the driver one SIGTERM and waits for its end. On every pod it then waits until no actor of the
# run is left, because a checkpoint needs all ranks while their pods are being ended too. The pod's
# terminationGracePeriodSeconds bounds it all and has to exceed checkpointing.signal_grace_s.
set -uo pipefail
pid_file="${NRL_DRIVER_PID_FILE:-/tmp/nemo_rl_driver.pid}"

if [[ -s "$pid_file" ]]; then
  driver="$(<"$pid_file")"
  if kill -TERM "$driver" 2>/dev/null; then
    while kill -0 "$driver" 2>/dev/null; do sleep 1; done
    # KubeRay asks the dashboard every few seconds how the job ended, and its submitter has to end first.
    sleep "${NRL_LAST_LOOK_S:-20}"
  fi
fi
# The others that Ray calls `ray::` are its agents, and workers that wait for a task.
while pgrep --full --list-full '^ray::' | grep --quiet --invert-match --extended-regexp ' ray::(IDLE|DashboardAgent|RuntimeEnvAgent)'; do
  sleep 1
done
