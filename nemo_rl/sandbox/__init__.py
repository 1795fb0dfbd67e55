"""Run untrusted programs, locked up by the kernel.

    outcome = Sandbox(Limits(wall_time_s=5)).run(Program("print(6 * 7)"))

`Sandbox.run` blocks and `Sandbox.run_async` does not; both return a `ProgramOutcome` for whatever the program does, and
raise `SandboxError` only where it did not run. `mechanisms` lists how programs are locked up, `supervision` starts and
ends them, and `jail/` is the code that runs inside, which imports nothing of the library.
"""

from nemo_rl.sandbox.program import End, Limits, Program, ProgramOutcome
from nemo_rl.sandbox.sandbox import Sandbox, choose_mechanism, why_unavailable

__all__ = ["End", "Limits", "ProgramOutcome", "Program", "Sandbox", "choose_mechanism", "why_unavailable"]
