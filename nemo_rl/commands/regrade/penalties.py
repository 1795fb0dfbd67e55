"""Find penalties again in the stored tokens of training samples."""

from collections.abc import Sequence
from itertools import groupby

from nemo_rl.commands.regrade.replay import Regraded
from nemo_rl.experience.penalties.review import AnswerReview


def review_again(graded: Sequence[Regraded], review: AnswerReview) -> None:
    """Review the samples that have a reward and stored tokens, as the run did; note the penalties on them."""
    for each in graded:
        row = each.sample.row
        if each.reward is not None and "token_ids" in row:
            each.penalties = review.judge(row["token_ids"], turn_spans(row["token_loss_mask"])).penalties


def turn_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return first token and end of each sampled turn; between two turns there are tokens of the environment.

    Args:
        mask: for each token of the sequence, 1 if it was sampled and 0 if not.

    Example:
        >>> turn_spans([0, 1, 1, 0, 1])
        [(1, 3), (4, 5)]
    """
    spans, start = [], 0
    for is_sampled, tokens in groupby(mask):
        end = start + len(list(tokens))
        if is_sampled:
            spans.append((start, end))
        start = end
    return spans
