"""Predict memory for one rank of each pipeline stage and take the largest, as all training backends do.

A backend's `memory_plan` states how its axes divide the counts of `memory_trace`, and which moments a step has.
Invariant: bytes are those of the one rank that needs most.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import default_chunk_size
from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Work
from nemo_rl.models.capacity.memory_trace import ModelTrace, Parameters, trace_model
from nemo_rl.models.draft.choice import shape_of
from nemo_rl.models.huggingface.load import torch_dtype


@dataclass(frozen=True)
class RankMemory(ABC):
    """Memory of one rank of a pipeline stage."""

    kept_operators: ClassVar[Collection[str]] = ()
    """Passed to `trace_model`."""

    policy: PolicyConfig
    """Section of the model."""
    layout: ParallelLayout
    """Sizes of the axes."""
    model: PretrainedConfig
    """Configuration of the model's text part."""
    trace: ModelTrace
    """Counts of the model."""
    work: Work
    """Work of the rank."""
    tokens: int
    """Tokens of a microbatch that this rank has."""
    itemsize: int
    """Bytes of a number of `policy.precision`."""
    stage: int
    """Index of the pipeline stage."""

    @classmethod
    def predict(cls, policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig, work: Work) -> MemoryPlan:
        """Return the plan of the rank that needs most; arguments as the attributes, but `model` is the whole model."""
        tokens, dtype = ceil(work.tokens / layout.cp), torch_dtype(policy.precision)
        scores = policy.reward_model_cfg.enabled
        trace = trace_model(model, tokens, dtype, scores=scores, kept_operators=cls.kept_operators)
        text = model.get_text_config()
        stages = range(layout.pp)
        ranks = (cls(policy, layout, text, trace, work, tokens, dtype.itemsize, stage) for stage in stages)
        return max((rank.plan() for rank in ranks), key=lambda plan: plan.peak)

    @abstractmethod
    def plan(self) -> MemoryPlan:
        """Return the memory at all moments of a step."""

    @property
    def has_head(self) -> bool:
        """True if the rank's stage is the last one."""
        return self.stage == self.layout.pp - 1

    @property
    def outside(self) -> list[Parameters]:
        """The parameters outside the layers: the first stage has the embedding, the last one norm and head."""
        first, last, trace = self.stage == 0, self.has_head, self.trace
        if last and not (first and trace.tied):
            return [trace.embedding, trace.last] if first else [trace.last]
        return [trace.last] if last else [trace.embedding] * first

    @property
    def largest(self) -> float:
        """The elements of the largest tensor, divided by the tensor-parallel ranks."""
        parts = (self.trace.embedding, self.trace.last, *self.trace.layers)
        return max(parameters.largest for parameters in parts) / self.layout.tp

    @property
    def head(self) -> float:
        """The bytes of the head in float32."""
        return self.has_head * self.trace.vocabulary * self.trace.hidden / self.layout.tp * WIDE

    def logits(self, tensors: int) -> float:
        """Return the bytes of this number of tensors, each as large as one chunk of float32 logits."""
        chunk = self.policy.logprob_chunk_size or default_chunk_size(on_gpu=not self.work.on_cpu)
        return self.has_head * tensors * min(self.tokens, chunk) * self.trace.vocabulary * WIDE / self.layout.tp

    def draft_model(self, shards: int) -> dict[str, float]:
        """Return the bytes of a draft model's weights, gradients and two moments in float32, if one is trained.

        Args:
            shards: number of ranks that divide them.
        """
        if not (self.policy.draft.enabled and self.work.trains):
            return {}
        return {"draft model": shape_of(self.policy).num_parameters * 4 * WIDE / shards}

    def scalar_head(self) -> float:
        """Return the bytes that the backward pass of a scalar head needs, if all tokens have a value; else 0.

        It has no logits, but float32 copies of the hidden states of these tokens, and of their gradient. Those of the
        last tokens of rows are too few to count.
        """
        of_tokens = self.has_head and self.trace.vocabulary == 1 and not self.work.scores_rows
        return of_tokens * 2 * self.tokens * self.trace.hidden * WIDE
