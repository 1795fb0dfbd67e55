"""An engine that keeps its process busy, for tests of what else its actor does."""

import time
from collections.abc import Collection

import torch

from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest
from nemo_rl.models.generation.stepped import Finished, SteppedEngine

STEP_S = 0.1


class BusyEngine(SteppedEngine):
    """Computes in Python for `STEP_S` a step, and answers nothing."""

    def __init__(self, settings: EngineSettings):
        super().__init__()

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """Accept every request."""

    def step(self) -> list[Finished]:
        """Keep the interpreter busy."""
        end = time.monotonic() + STEP_S
        while time.monotonic() < end:
            pass
        return []

    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        """Remove nothing."""
        return []

    def num_tokens(self, request_id: str) -> int:
        """Return no tokens."""
        return 0

    def start_loading(self) -> None:
        """Do nothing."""

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Do nothing."""

    def finish_loading(self, *, changed: bool) -> list[str]:
        """Do nothing."""
        return []

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return nothing."""
        return []

    async def sleep(self) -> None:
        """Do nothing."""

    async def wake_up(self) -> None:
        """Do nothing."""
