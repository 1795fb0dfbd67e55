"""Provide message logs under NeMo RL's names, with two helpers that only programs for NeMo RL call."""

from collections.abc import Sequence

import torch

from nemo_rl.data.collate_fn import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    message_log_to_flat_messages,
)
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.data.messages.conversations import get_formatted_message_log

__all__ = [
    "add_loss_mask_to_message_log",
    "batched_message_log_to_flat_message",
    "get_formatted_message_log",
    "get_keys_from_message_log",
    "message_log_shape",
    "message_log_to_flat_messages",
]


def get_keys_from_message_log(message_log: LLMMessageLogType, keys: Sequence[str]) -> LLMMessageLogType:
    """Return the log with only the given keys. Keys that a message lacks are ignored."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def message_log_shape(message_log: LLMMessageLogType) -> list[dict[str, torch.Size]]:
    """Return the shapes of the tensors of each message, for debugging."""
    return [
        {key: value.shape for key, value in message.items() if isinstance(value, torch.Tensor)}
        for message in message_log
    ]
