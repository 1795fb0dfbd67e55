"""What TRL's sides of the comparisons share: the rule that rewards an answer, and the clock of generation.

Their environments have TRL and not nemo_rl.
"""

import re
import time
from typing import Any

from transformers import PreTrainedModel

BOXED_INTEGER = re.compile(r"\\boxed\{(-?\d+)\}")


def boxed_reward(text: str, truth: str) -> float:
    """Return 1 where the last boxed integer of a text is the right one, else 0."""
    boxes = BOXED_INTEGER.findall(text)
    return float(bool(boxes) and int(boxes[-1]) == int(truth))


class GenerationClock:
    """Measures seconds in a model's generation method since the last `take`.

    Args:
        model: the model in training; its method is replaced by a timed one.
        method: "generate", or "generate_batch" for continuous batching.
    """

    def __init__(self, model: PreTrainedModel, method: str):
        self._seconds = 0.0
        generate = getattr(model, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - started

        setattr(model, method, timed)

    def take(self) -> float:
        """Return the seconds since the last call of `take`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
