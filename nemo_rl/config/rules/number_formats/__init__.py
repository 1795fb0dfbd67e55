"""Checks the keys of float8 formats: those of engines, and those of training with Megatron Core."""

from nemo_rl.config.rules.number_formats.engines import check_engine_formats
from nemo_rl.config.rules.number_formats.training import check_fp8_training, fp8_row_multiple

__all__ = ["check_engine_formats", "check_fp8_training", "fp8_row_multiple"]
