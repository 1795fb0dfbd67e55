"""Train with Megatron Core and sample with engines on a small copy of a model, in a folder of its own.

Both read the copy as they read a checkpoint of a hub. Invariant: the reference is transformers' own model in one
process, and everything else runs in child processes with deadlines.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_rl.commands.conformance.case import Case
from nemo_rl.commands.conformance.run import check_engine
from nemo_rl.commands.doctor.megatron_cells import SmallModel, megatron_cells
from nemo_rl.commands.doctor.model_cells import Cell, TrialResult, measured
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.files.trusted_code import copy_code
from nemo_rl.models.dtensor.proof.small import SmallMesh, small_model, small_policy
from nemo_rl.models.generation.factory import check_engine_model, engine_settings
from nemo_rl.models.huggingface.load import torch_dtype

_CONTEXT, _VOCABULARY = 256, 512
_CALM = 0.4
"""Factor of the copy's matrices. With the larger weights of a proof, rounding to bfloat16 changes log-probabilities by
1, as much as an error does."""
_PROPERTIES = ("logprobs", "update")
"""Properties of `conformance` that an engine must have: the distributions of the folder and of two weight updates."""
_ENGINE_TOLERANCE = 1e-3
"""Largest accepted difference of a log-probability of an engine in float32 from transformers."""
_ROUNDING = 2.0
"""Largest accepted mean distance of an engine in bfloat16 from transformers in float32, as a multiple of that of
transformers in bfloat16."""
_ONE = SmallMesh(ParallelLayout(), 1)
_PARTS = SmallMesh(ParallelLayout(pp=2, tp=2), virtual=2)
"""Mesh whose ranks divide the copy: heads and vocabulary by two, and four layers into stages."""


@contextmanager
def saved_small_copy(base: PolicyConfig, model: PretrainedConfig) -> Iterator["SmallCopy"]:
    """Make the small model of an architecture in a temporary folder, with a tokenizer.

    Raises:
        ConfigError: the architecture's code does not run.
    """
    form = deepcopy(model)
    text: Any = form.get_text_config()
    text.vocab_size = max(text.vocab_size, _VOCABULARY)
    padded = base.sequence_packing.model_copy(update={"enabled": False})
    hf = small_model(form, small_policy(base.model_copy(update={"sequence_packing": padded}), _ONE), _PARTS)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_CALM)
    with tempfile.TemporaryDirectory(prefix="nrl-small-") as folder:
        hf.save_pretrained(folder)
        copy_code(str(model.name_or_path), Path(folder))
        _tokenizer(hf.config.get_text_config()).save_pretrained(folder)
        yield SmallCopy(base, hf, folder)


def _tokenizer(text: Any) -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(text.vocab_size)}
    end = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token=str(end or 0), pad_token="0"
    )


class SmallCopy:
    """The small model of an architecture, in memory and in a folder."""

    def __init__(self, base: PolicyConfig, hf: Any, folder: str) -> None:
        self._base, self._hf, self.folder = base, hf, folder

    def megatron_cells(self) -> Iterator[Cell]:
        """Yield the cells of Megatron Core: the rows on each mesh, and the conversion of the weights in both ways."""
        yield from megatron_cells(SmallModel(self._base.model_name, self._base, self._hf, self.folder))

    def engine_cells(self, backend: str, precisions: Sequence[str]) -> Iterator[Cell]:
        """Yield a cell for each precision of an engine: log-probabilities of the files and after two weight updates."""
        for precision in precisions:
            yield measured(backend, f"{precision}, with weight updates", partial(self._engine, backend, precision))

    def _engine(self, backend: str, precision: str) -> tuple[TrialResult, str, float | None]:
        engine = self._base.sampling.engine.model_copy(update={"precision": precision})
        generation = self._base.sampling.model_copy(update={"backend": backend, "engine": engine})
        policy = self._base.model_copy(update={"generation": generation, "precision": precision})
        cluster = ClusterConfig.build(device="cpu")
        check_engine_model(policy, cluster)
        length = min(_CONTEXT, engine.max_model_len)
        short = engine.model_copy(update={"max_model_len": length})
        tokenizer = policy.tokenizer.model_copy(update={"name": self.folder})
        generation = generation.model_copy(update={"engine": short})
        changed = {"model_name": self.folder, "tokenizer": tokenizer, "generation": generation}
        settings = engine_settings(policy.model_copy(update=changed), cluster, seed=0, load_weights=True)
        dtype = None if precision == "float32" else torch_dtype(precision)
        case = Case(self.folder, tolerance=_ENGINE_TOLERANCE, max_model_len=length, dtype=dtype)
        report = check_engine(settings, case, _PROPERTIES)
        if report.failures:
            return TrialResult.FAILED, _reason(next(iter(report.failures.values()))), report.largest
        if dtype is None:
            return TrialResult.RIGHT, precision, report.largest
        mean, of_rounding = (fmean(distances) for distances in zip(*report.distances, strict=True))
        if mean > _ROUNDING * of_rounding:
            told = f"log-probabilities differ by {mean:.3g} on average, and those of transformers by {of_rounding:.3g}"
            return TrialResult.FAILED, f"{told}, from float32", mean
        return TrialResult.RIGHT, f"{precision}, on average", mean


def _reason(failure: str) -> str:
    """Return the message of a failure, without the stack above it and the details below it."""
    lines = failure.strip().splitlines()
    named = [line for line in lines if line.partition(": ")[0].endswith(("Error", "Exception"))]
    return named[-1] if named else lines[0]
