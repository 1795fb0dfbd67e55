"""Re-export the command line, which is now in `nemo_rl.launch.command_line`, under its former path."""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__, dict.fromkeys(("exit_status", "launch"), "nemo_rl.launch.command_line"))
