"""Run untrusted programs, which the kernel isolates from the machine.

    outcome = Sandbox(Limits(wall_time_s=5)).run(Program("print(6 * 7)"))

`Sandbox.run` blocks, and `Sandbox.run_async` does not. Both return a `ProgramOutcome`, whatever the program does, and
raise `SandboxError` only if the program did not run. `mechanisms` lists the ways to isolate programs, and `supervision`
starts and ends them. `jail/` is the code that runs inside the sandbox, and imports nothing of the library.
"""

from nemo_rl.sandbox.program import End, Limits, Program, ProgramOutcome
from nemo_rl.sandbox.sandbox import Sandbox, choose_mechanism, why_unavailable

__all__ = ["End", "Limits", "ProgramOutcome", "Program", "Sandbox", "choose_mechanism", "why_unavailable"]
