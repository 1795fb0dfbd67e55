"""Count the work of a policy in a step, so that a run can report its throughput.

`rank_calls` counts each pass over rows and measures its time. `algorithms.runtime.throughput` takes the counts once a
step. Invariant: rows are counted with their own lengths, without padding. Filler rows are not counted.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.host.device import device_name
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import ModelFlops, model_flops
from nemo_rl.models.training.low_rank import select_modules

logger = logging.getLogger(__name__)

_NOT_COUNTED = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError)
"""Errors of architectures that transformers cannot build from their configuration, or that lack common fields."""


@dataclass(frozen=True)
class PassCosts:
    """Cost of a pass over rows."""

    flops: ModelFlops | None
    """Number of operations of the model. None if they cannot be counted."""
    device: str | None
    """Name of the GPU. None for a CPU."""
    reason: str = ""
    """Reason why the number of operations is unknown. Empty if it is known."""
    is_failure: bool = False
    """Whether the request failed in a way that another attempt may succeed."""


def pass_costs(config: PolicyConfig, device: torch.device) -> PassCosts:
    """Return the costs of a model's passes.

    Adapters of the Megatron backend are counted for all linear layers, because its layer names cannot be compared.
    Their share of the operations is small.
    """
    name = None if device.type == "cpu" else device_name(device)
    lora, peft = config.dtensor_cfg.lora_cfg, config.megatron_cfg.peft
    dim = {"dtensor_cfg.lora_cfg": lora.dim, "megatron_cfg.peft": peft.dim}
    adapters = [dim[key] for key in config.adapter_keys]

    def adapted(linears: list[str]) -> list[str]:
        return select_modules(linears, lora, "policy.dtensor_cfg.lora_cfg") if lora.enabled else linears

    try:
        flops = model_flops(
            load_model_config(config.model_name, config.hf_config_overrides),
            scores=config.reward_model_cfg.enabled,
            adapters=adapters[0] if adapters else 0,
            adapted=adapted,
        )
    except _NOT_COUNTED as error:
        return PassCosts(None, name, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    return PassCosts(flops, name)


type PassKind = Literal["training", "scoring"]

_MOST_ATTEMPTS = 3
"""Largest number of attempts to get the costs. It is small, because a failing attempt may take long."""


@dataclass
class PassWork:
    """The passes of one kind."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Number of rows of each length, over all passes. It does not grow with the number of passes, so a model whose
    counts are never taken, such as a teacher, needs no more memory in longer runs."""
    seconds: float = 0.0
    """Seconds that the passes took."""
    shared_tokens: int = 0
    """Number of these tokens that were not computed because another row of their microbatch has them too."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(length * rows for length, rows in self.lengths.items())


class WorkCount:
    """Count the passes of a policy since the last `take`. Several threads may count at the same time.

    Args:
        describe: Function that returns the costs of passes over rows. It is called when the costs are first needed, and
            a few more times if it fails.
    """

    def __init__(self, describe: Callable[[], PassCosts]) -> None:
        self._describe = describe
        self._guard = threading.Lock()
        self._passes = _none()
        self._costs: PassCosts | None = None
        self._attempts = 0

    @property
    def costs(self) -> PassCosts:
        """The cost of a pass over rows."""
        if self._costs is None or (self._costs.is_failure and self._attempts < _MOST_ATTEMPTS):
            self._attempts += 1
            self._costs = self._describe()
        return self._costs

    @contextmanager
    def of(self, kind: PassKind, lengths: Iterable[int] = (), shared_tokens: int = 0) -> Generator[None]:
        """Count a block as passes over rows of these lengths, unless it raises an error (`PassWork`)."""
        started = time.perf_counter()
        yield
        with self._guard:
            work = self._passes[kind]
            work.lengths.update(lengths)
            work.seconds += time.perf_counter() - started
            work.shared_tokens += shared_tokens

    def take(self) -> dict[PassKind, PassWork]:
        """Return the counts, and reset them."""
        with self._guard:
            taken, self._passes = self._passes, _none()
        return taken


def _none() -> dict[PassKind, PassWork]:
    return {"training": PassWork(), "scoring": PassWork()}
