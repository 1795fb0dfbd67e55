"""Keys that say how programs of a model are locked up, and what each of them may use."""

from typing import Literal

from nemo_rl.config.base.numbers import Amount, Mebibytes, ProgramMebibytes, Workers
from nemo_rl.config.base.section import Section


class SandboxKeys(Section):
    """Base of sections whose programs run in a sandbox."""

    sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """Mechanism that locks programs up; auto: the first that works on the machine. Where none works, the run is
    refused."""
    memory_mb: ProgramMebibytes = 512
    """Memory of a program in MiB."""
    max_processes: Workers = 16
    """Processes and threads of a program."""
    file_mb: Mebibytes = 16
    """Size of each file that a program writes, in MiB."""
    scratch_mb: Mebibytes = 64
    """Size of all its files together, in MiB."""
    output_bytes: Amount = 262144
    """Bytes of output after which a program is ended."""
