"""Draw responses under a grammar's mask, and let vLLM read them again to score them without the mask.

    prompt ─► tokens, drawn under the mask ─► prompt and tokens as a second prompt ─► log-probabilities of the policy

vLLM masks the logits before it computes any log-probability of a drawn token, even a raw one. The log-probabilities of
a prompt are computed without mask, temperature and filter. Invariant: all log-probabilities of a response are computed
by the same weights.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from nemo_rl.data.images.rows import RowImages
from nemo_rl.models.generation.interfaces import Grammar, SamplingParams
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.utils.errors import GenerationError, NonFiniteError


def of_tokens(token_ids: list[int], table: object, num_before: int = 0) -> list[float]:
    """Return the log-probability of each token from a table with one entry for each position.

    Args:
        table: vLLM's `FlatLogprobs`.
        num_before: Number of entries before those of the tokens.

    Raises:
        GenerationError: The table has other tokens.
        NonFiniteError: A log-probability is NaN.
    """
    table_ids = list(getattr(table, "token_ids", []))[num_before:]
    values = list(getattr(table, "logprobs", []))[num_before:]
    if table_ids != token_ids or len(values) != len(token_ids):
        raise GenerationError(
            f"vLLM returned log-probabilities of {len(table_ids)} tokens for {len(token_ids)} sampled ones."
        )
    if math.isnan(sum(values)):
        raise NonFiniteError("vLLM's log-probabilities are not finite.")
    return values


REFUSED = "vLLM cannot keep an answer to this form"


def structured_outputs(grammar: Grammar) -> StructuredOutputsParams:
    """Translate a grammar into vLLM's parameters.

    Raises:
        ValueError: The grammar is not valid.
    """
    kind, definition = grammar
    values: Mapping[str, Any] = {kind: json.loads(definition) if kind == "choice" else definition}
    return StructuredOutputsParams(**values)


def is_scored(sampling: SamplingParams) -> bool:
    """Return whether a response is read again after it was sampled.

    Raises:
        GenerationError: It must be, but it is sampled from another distribution than the policy's.
    """
    if not sampling.is_read_again:
        return False
    if not sampling.draws_from_policy:
        raise GenerationError(
            "The log-probabilities of a response with a grammar are known at temperature 1 without top_k, top_p and "
            f"bad_words only, and it shall be drawn with temperature={sampling.temperature:g}, top_k={sampling.top_k}, "
            f"top_p={sampling.top_p:g} and bad_words={list(sampling.bad_words)}."
        )
    return True


def reading() -> VllmSamplingParams:
    """Return the parameters with which vLLM reads a prompt and returns the prompt's log-probabilities."""
    return VllmSamplingParams(
        temperature=0.0,
        max_tokens=1,  # vLLM draws at least one token; it is not used
        prompt_logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@dataclass
class ResponseScoring:
    """The responses of one engine that are scored after they were sampled."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Prompts of these responses, by request id."""
    images: dict[str, RowImages] = field(default_factory=dict)
    """Images of these prompts, by request id. A prompt without images may be missing."""
    drawn: dict[str, Finished] = field(default_factory=dict)
    """Completely sampled responses that are being read again, by request id."""

    def forget(self, request_id: str) -> None:
        """Drop a response."""
        self.prompts.pop(request_id, None)
        self.images.pop(request_id, None)
        self.drawn.pop(request_id, None)

    def tokens_to_read(self, request_id: str) -> list[int]:
        """Return the tokens of the prompt and of a drawn response."""
        return [*self.prompts[request_id], *self.drawn[request_id].token_ids]

    def scored(self, output: RequestOutput) -> Finished:
        """Return the response with the log-probabilities of the second pass, and remove the request."""
        request_id = output.request_id
        prompt, drawn = self.prompts[request_id], self.drawn[request_id]
        self.forget(request_id)
        # The first token of a prompt has no log-probability.
        values = of_tokens(drawn.token_ids, output.prompt_logprobs, num_before=len(prompt) - 1)
        return drawn._replace(logprobs=values)
