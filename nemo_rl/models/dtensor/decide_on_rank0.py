"""Compute a result on rank 0 and share it with all ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nemo_rl.utils.errors import ConfigError


def decide_on_rank0[AnswerT](find_out: Callable[[], AnswerT]) -> AnswerT:
    """Call a function on rank 0 and broadcast its result; collective.

    Raises:
        ConfigError: raised on all ranks if the function raised it on rank 0.
    """
    shared: list[Any] = [None, "rank 0 could not find out how the model computes; its log says why."]
    try:
        if dist.get_rank() == 0:
            shared = [find_out(), None]
    except ConfigError as error:
        shared[1] = str(error)
    finally:
        dist.broadcast_object_list(shared, src=0)
    answer, trouble = shared
    if trouble is not None:
        raise ConfigError(trouble)
    return answer
