"""Read log-probabilities from vLLM's flat tables."""

import math

from nemo_rl.utils.errors import GenerationError, NonFiniteError


def of_tokens(token_ids: list[int], table: object, num_before: int = 0) -> list[float]:
    """Read each token's log-probability from a table with one entry for each position.

    Args:
        token_ids: the tokens.
        table: vLLM's `FlatLogprobs`.
        num_before: entries of other tokens before them.

    Raises:
        GenerationError: the table is of other tokens.
        NonFiniteError: a log-probability is NaN.
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
