"""Re-export the command line under its former path; programs import it from `nemo_rl.launch.command_line`."""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__, dict.fromkeys(("exit_status", "launch"), "nemo_rl.launch.command_line"))
