"""Weigh what the policy learns from a teacher, by row and by token.

    section of a teacher ─► TeacherWeight ─► factors [R, T] ─► loss of distillation, or advantages of GRPO

The factor of a token is `weight` of the teacher times the factor that `token_weights` gives the token. Invariant: all
factors are finite and at least 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, override

import torch
from torch import Tensor

from nemo_rl.config import RewardPenaltyConfig, TeacherConfig, TokenWeightsConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.experience.thinking import ThinkingReader, sampled_turns, thinking_reader
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.named_parts import Registry


class TokenWeights(Protocol):
    """Interface of the factors of tokens. A user's class is named by its dotted path."""

    def factors(self, token_ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> Sequence[float]:
        """Return the factor of each token of a row.

        Args:
            token_ids: Tokens of the row, without padding.
            turns: Start and end position of each response of the policy, or of each text that counts in the loss.

        Returns:
            As many numbers as there are tokens, finite and at least 0. Those outside of the turns have no effect.
        """


TOKEN_WEIGHTS: Registry[TokenWeights] = Registry("weights of tokens", TokenWeights)


@dataclass(frozen=True)
class ThinkingWeights(TokenWeights):
    """One factor for the tokens of thinking, and one for all others."""

    reader: ThinkingReader
    thinking: float
    answer: float

    @override
    def factors(self, token_ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[float]:
        found = [self.answer] * len(token_ids)
        for turn in sampled_turns(self.reader, token_ids, turns):
            for start, end in turn.thinking_spans:
                found[turn.start + start : turn.start + end] = [self.thinking] * (end - start)
        return found


@dataclass(frozen=True)
class TeacherWeight:
    """Factors of what the policy learns from a teacher."""

    row: float = 1.0
    """Factor of all tokens."""
    tokens: TokenWeights | None = None
    """Further factors of single tokens. None: all are 1."""

    @classmethod
    def make(cls, row: float, given: TokenWeightsConfig, tokenizer: TokenizerType, place: str) -> "TeacherWeight":
        """Return the factors that the section at the key `place` describes. A class that cannot be used is an error."""
        if TOKEN_WEIGHTS.is_own(given.name):
            return cls(row, TOKEN_WEIGHTS.make(given.name, place, given.kwargs))
        if given.name == "equal":
            return cls(row)
        reader = thinking_reader(RewardPenaltyConfig.build(thinking_tags=given.thinking_tags), tokenizer)
        return cls(row, ThinkingWeights(reader, given.thinking, given.answer))

    def of(self, tensors: Mapping[str, Any], rows: Sequence[int]) -> Tensor | None:
        """Return the factors of some rows of a batch, `[R, T]` float32, or None if all are 1.

        Args:
            tensors: `input_ids` and `token_mask` `[B, T]`, `input_lengths` `[B]`.

        Raises:
            ConfigError: A user's class returns other than one number of at least 0 for each token.
        """
        if self.tokens is None and self.row == 1:
            return None
        found_RT = torch.full((len(rows), tensors["input_ids"].shape[1]), self.row)
        for place, index in enumerate(rows if self.tokens is not None else ()):
            length = int(tensors["input_lengths"][index])
            turns = _turns(tensors["token_mask"][index, :length])
            found_RT[place, :length] *= self._of_row(tensors["input_ids"][index, :length].tolist(), turns)
        return found_RT

    def _of_row(self, token_ids: list[int], turns: list[tuple[int, int]]) -> Tensor:
        assert self.tokens is not None
        given = self.tokens.factors(token_ids, turns)
        found = torch.as_tensor(given, dtype=torch.float32)
        if found.shape != (len(token_ids),) or not (torch.isfinite(found) & (found >= 0)).all():
            raise ConfigError(
                f"token_weights: {type(self.tokens).__name__}.factors must return {len(token_ids)} finite numbers of "
                f"at least 0, one for each token; it returned {found.numel()}: {found.tolist()[:8]}."
            )
        return found


EQUAL = TeacherWeight()


def weight_of(section: TeacherConfig, tokenizer: TokenizerType, role: str) -> TeacherWeight:
    """Return the factors of a teacher, by its section and its name in the run."""
    return TeacherWeight.make(section.weight, section.token_weights, tokenizer, f"{role}.token_weights")


def _turns(mask_T: Tensor) -> list[tuple[int, int]]:
    """Return start and end of each run of tokens that count."""
    is_counted = torch.nn.functional.pad((mask_T != 0).int(), (1, 1))
    bounds = (is_counted.diff() != 0).nonzero()[:, 0].tolist()
    return [(start, end) for start, end in pairwise(bounds) if is_counted[start + 1]]
