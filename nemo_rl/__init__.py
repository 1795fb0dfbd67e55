"""Train language models by reinforcement learning, supervised training and preferences.

The names below are what a notebook needs (docs/start/python.md, notebook.md). Other names are imported from their
modules. Invariant: a name is imported when it is first used, so `import nemo_rl` and `import nemo_rl.config` load
neither torch nor ray.
"""

from typing import TYPE_CHECKING

from nemo_rl.compat.public_names import install_finders, public_names

if TYPE_CHECKING:
    from nemo_rl.algorithms.setup.open_policy import OpenPolicy, open_policy
    from nemo_rl.data.chat_batch import chat_batch
    from nemo_rl.launch.python_runs import dpo, evaluate, grpo, sft
    from nemo_rl.losses.invariance import check_invariance
    from nemo_rl.losses.loss_function import LossInputType, LossType, TokenLoss, token_loss

__version__ = "0.1.0"
"""As in pyproject.toml, which environments of workers are made from where there is no checkout."""

_HOMES = {
    "LossInputType": "nemo_rl.losses.loss_function",
    "LossType": "nemo_rl.losses.loss_function",
    "OpenPolicy": "nemo_rl.algorithms.setup.open_policy",
    "TokenLoss": "nemo_rl.losses.loss_function",
    "chat_batch": "nemo_rl.data.chat_batch",
    "check_invariance": "nemo_rl.losses.invariance",
    "dpo": "nemo_rl.launch.python_runs",
    "evaluate": "nemo_rl.launch.python_runs",
    "grpo": "nemo_rl.launch.python_runs",
    "open_policy": "nemo_rl.algorithms.setup.open_policy",
    "sft": "nemo_rl.launch.python_runs",
    "token_loss": "nemo_rl.losses.loss_function",
}

__all__ = [
    "LossInputType",
    "LossType",
    "OpenPolicy",
    "TokenLoss",
    "chat_batch",
    "check_invariance",
    "dpo",
    "evaluate",
    "grpo",
    "open_policy",
    "sft",
    "token_loss",
]


__getattr__ = public_names(__name__, _HOMES)
install_finders()


def __dir__() -> list[str]:
    """The names above and the names of the module itself."""
    return sorted({*globals(), *__all__})
