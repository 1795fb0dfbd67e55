"""Tell which weights of a model stay float32 when the model computes in bfloat16 or float16.

They are those that transformers keeps (`_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules` in float16), and by
their names the biases that choose experts and the parameters of recurrent states. Rounding a bias of size 6 to bfloat16
sends a quarter of the tokens to other experts. Engines hold all of these in float32, or round them as they load them.

Invariant: training, weight syncs and engines of the library ask here, so all of them keep the same weights.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    # The driver, which holds no model, does without the import.
    from transformers.modeling_utils import PreTrainedModel

_ROUNDED = (torch.bfloat16, torch.float16)
_BY_NAME = r"(?:^|\.)(?:e_score_correction_bias|expert_bias|A_log|dt_bias|D)$"


def stays_float32(hf: "PreTrainedModel", dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return whether a weight stays float32 in a model that computes in `dtype`, by its name in the model.

    Args:
        hf: the model.
        dtype: number format of the other weights; with None or float32 nothing has to be kept.
    """
    if dtype not in _ROUNDED:
        return lambda _: False
    return _search_for(hf._get_dtype_plan(dtype))


def stays_float32_in_files(architecture: str | None, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return whether a tensor of a model folder stays float32 when the others are written in `dtype`, by its name.

    Args:
        architecture: name of the model's class in transformers; None: only the names that all models share.
        dtype: number format of the other tensors.
    """
    if dtype not in _ROUNDED:
        return lambda _: False
    model_class = getattr(transformers, architecture or "", None)
    names = list(getattr(model_class, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names += getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return _search_for(names)


def _search_for(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a name is kept; transformers searches names for patterns (`build_glob_alternation`)."""
    kept = re.compile("|".join([_BY_NAME, *(name.replace("*", ".*") for name in patterns)]))
    return lambda name: kept.search(name) is not None


def float32_parameters(hf: "PreTrainedModel", dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters that stay float32 in a model that computes in `dtype`, by name."""
    stays = stays_float32(hf, dtype)
    return {name: each for name, each in hf.named_parameters() if each.is_floating_point() and stays(name)}


@torch.no_grad()
def hold_in_float32(hf: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Hold the parameters that stay float32 in float32, in a model whose other weights are in `dtype`."""
    for parameter in float32_parameters(hf, dtype).values():
        parameter.data = parameter.data.float()
