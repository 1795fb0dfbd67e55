"""Sample with SGLang servers over HTTP. The package sglang is only needed to start servers.

Source of the interface: docs.sglang.io, pages "Sampling Parameters" and "SGLang for RL Systems".
"""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__)
