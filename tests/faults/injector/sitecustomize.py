"""Send a signal to a process of a run while the run is in a given phase of a given step, or at a given update.

Python imports this file at the start of every process that finds it on its path. It acts only in the program whose
environment has FAULT_PLAN, and takes the variable away from the program's children. The signal leaves some milliseconds
after the phase has started, and the phase does not end before.

An update is a phase too: "update of NAME", and "before update of NAME", when the update before is complete and nothing
of this one has happened. NAME is the prefix of the ranks' names; the place of the step has the number of the update
since the start of the program, from 1.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

_SESSION = "nemo_rl.algorithms.runtime.session"
_RANK_CALLS = "nemo_rl.models.policy.rank_calls"
_TIMED = {"weight_sync": "sync", "generation": "sampling", "policy_training": "training"}
_TITLES = {
    "policy rank": ("ray::PolicyRank", "ray::lm_policy"),
    "critic rank at work": ("ray::value",),
    "engine": ("ray::GenerationWorker", "ray::vllm_engine", "ray::hf_engine"),
    "environment": ("ray::EnvironmentActor",),
    "rollout runner": ("ray::RunnerActor",),
}
_DELAY_S = {"sync": 0.01, "saving": 0.02, "update of value": 0.01}


class Fault:
    """One fault, from a plan: victim, phase, step, signal, hold_s and the file that receives what was done."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.is_due = True

    @contextmanager
    def within(self, phase: str | None, step: int) -> Iterator[None]:
        """Commit the fault in the block if it is the planned phase."""
        if not self.is_due or phase != self.plan["phase"] or step != self.plan["step"]:
            yield
            return
        self.is_due = False
        sender = threading.Timer(_DELAY_S.get(phase, 0.05), self._commit)
        sender.start()
        try:
            yield
        finally:
            sender.join()
            time.sleep(self.plan["hold_s"])

    def _commit(self) -> None:
        pid, number = self._find(), signal.Signals[self.plan["signal"]]
        Path(self.plan["report"]).write_text(json.dumps({"pid": pid, "at": time.time()}))
        if pid == os.getpid() and number == signal.SIGSTOP:
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 5; kill -CONT {pid}"], start_new_session=True)
        else:
            os.kill(pid, number)

    def _find(self) -> int:
        import psutil

        victim, me = self.plan["victim"], psutil.Process()
        if victim == "driver":
            return me.pid
        for process in sorted(me.children(recursive=True), key=lambda child: -child.pid):
            try:
                title, name = " ".join(process.cmdline()), process.name()
            except psutil.Error:
                continue
            is_grading = victim == "grading process" and "grading.worker_main" in title
            is_daemon = name == {"raylet": "raylet", "gcs": "gcs_server"}.get(victim)
            if is_grading or is_daemon or title.startswith(_TITLES.get(victim, ("no such title",))):
                return process.pid
        raise AssertionError(f"no process of the run is the {victim}")


def watch_phases(module: Any, fault: Fault) -> None:
    """Let a session tell the fault about its phases."""
    session_class = module.Session
    phase = session_class.phase

    @contextmanager
    def told_phase(self: Any, name: str) -> Iterator[None]:
        with phase(self, name), fault.within(_TIMED.get(name), self.state.total_steps + 1):
            yield

    def told(method: Callable[[Any, int], None], name: str) -> Callable[[Any, int], None]:
        def run(self: Any, step: int) -> None:
            with fault.within(name, step):
                method(self, step)

        return run

    session_class.phase = told_phase
    session_class._checkpoint = told(session_class._checkpoint, "saving")
    session_class._validate = told(session_class._validate, "validating")


def watch_updates(module: Any, fault: Fault) -> None:
    """Let the calls of ranks tell the fault about the updates of each model."""
    with_rows, made = module.RankCalls.with_rows, Counter[str]()

    def told(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method != "train":
            return with_rows(self, method, *args, **options)
        name = self._workers.name_prefix
        made[name] += 1
        with fault.within(f"before update of {name}", made[name]):
            pass
        with fault.within(f"update of {name}", made[name]):
            return with_rows(self, method, *args, **options)

    module.RankCalls.with_rows = told


class _Patch(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules when it has been imported."""

    def __init__(self, watchers: dict[str, Callable[[Any], None]]) -> None:
        self._watchers = watchers

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        watch = self._watchers.pop(fullname, None)
        if watch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "FAULT_PLAN" in os.environ:
    committed = Fault(json.loads(os.environ.pop("FAULT_PLAN")))
    watchers = {_SESSION: partial(watch_phases, fault=committed), _RANK_CALLS: partial(watch_updates, fault=committed)}
    sys.meta_path.insert(0, _Patch(watchers))
