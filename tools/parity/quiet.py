"""Silence libraries in tools that try many models."""

import logging
import warnings

import torch
import transformers


def be_quiet() -> None:
    """Hide warnings and progress bars of this process, and compute on one thread, as several processes do."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
