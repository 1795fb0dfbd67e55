"""Score samples with a teacher that has another tokenizer, by comparing spans of text.

    student  |He|llo| wor|ld|.|EOS|        bytes of all tokens ─► common ends ─► spans
    teacher  |Hello| |world|.|EOS|         |Hello| world|.|EOS|

The teacher reads the prompt in its own chat template, and the text of the answer in its own tokens. A span is the
shortest text that ends between two tokens of both. Its log-probability is the sum over its tokens, so the difference
between teacher and student is that of the text, for any two tokenizers (GOLD, Hugging Face 2025, compares such spans
too). Each token of a span gets the difference of the whole span, because the gradient of the span's log-probability is
the sum of those of its tokens. Invariant: tokens of both sides spell the same bytes, or the sample has no teacher.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts, batch_of
from nemo_rl.algorithms.teaching.teachers import TeacherRoutes, write_scores
from nemo_rl.algorithms.teaching.token_weights import EQUAL, TeacherWeight
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.encoding import begins_with_bos, encode_continuation, encode_text
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.utils.errors import ConfigError, DataError

type TokenBytes = Callable[[int], bytes]
"""Function that returns the bytes that a token id stands for."""

_WORD_MARK = "▁"


def token_bytes(tokenizer: TokenizerType) -> TokenBytes:
    """Return a function that gives the bytes of each token id. Bytes of added tokens are those of their text.

    Raises:
        ConfigError: The tokenizer is neither a byte-level one nor one with word marks, as SentencePiece makes them.
    """
    kind = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__()) if tokenizer.is_fast else {}
    text = json.dumps(kind)
    added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
    if '"ByteLevel"' in text:
        spell: Callable[[str], bytes] = _of_byte_level
    elif '"Metaspace"' in text or _WORD_MARK in text or '"ByteFallback"' in text:
        spell = _with_word_marks
    else:
        raise ConfigError(
            f"the tokens of tokenizer {tokenizer.name_or_path!r} have no known bytes (decoder {kind.get('type')}), so "
            "a teacher with another tokenizer cannot be compared with it. Use a byte-level or SentencePiece tokenizer."
        )

    @cache
    def found(token: int) -> bytes:
        return added[token] if token in added else spell(str(tokenizer.convert_ids_to_tokens(token)))

    return found


def _of_byte_level(name: str) -> bytes:
    bytes_of = _byte_of_character()
    return bytes(bytes_of[char] for char in name)


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable bytes are themselves (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _with_word_marks(name: str) -> bytes:
    if len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(_WORD_MARK, " ").encode()


def common_spans(left: Sequence[bytes], right: Sequence[bytes]) -> Iterator[tuple[slice, slice]]:
    """Yield the shortest spans of tokens that spell the same bytes, in order.

    Args:
        left: The bytes of each token of a text.
        right: The bytes of each token of the same text.

    Raises:
        ValueError: The tokens do not spell the same bytes.

    Example:
        >>> list(common_spans([b"He", b"llo", b"!"], [b"Hello", b"!"]))
        [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 2, None))]
    """
    if b"".join(left) != b"".join(right):
        raise ValueError("the tokens spell different bytes")
    ends_left, ends_right = list(accumulate(map(len, left))), list(accumulate(map(len, right)))
    start_left = start_right = 0
    for end in sorted(set(ends_left) & set(ends_right)):
        stop_left, stop_right = _after(ends_left, end), _after(ends_right, end)
        yield slice(start_left, stop_left), slice(start_right, stop_right)
        start_left, start_right = stop_left, stop_right


def _after(ends: Sequence[int], end: int) -> int:
    """Return the number of tokens up to a position. Tokens without bytes belong to the span before them."""
    return len(ends) - ends[::-1].index(end)


@dataclass(frozen=True)
class AlignedTeacher:
    """Stage that scores the rows of a teacher with another tokenizer (`runtime.run.Stage`)."""

    teacher: ScoringModel
    """The model that scores."""
    role: str
    """Name of the model in the run."""
    routes: TeacherRoutes
    """Choice of the teacher of each row, by its role."""
    prompts: TeacherPrompts
    """Prompts in the teacher's tokens."""
    student: TokenizerType
    """Tokenizer of the policy."""
    longest: int
    """Largest number of tokens of a row of the teacher."""
    weight: TeacherWeight = EQUAL
    """Factors of the advantages (`write_scores`)."""

    name = "teacher_logprob_inference"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the model that the stage uses."""
        return (self.role,)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write the teacher's rows of `teacher_logprobs` `[B, T]` float32. The batch must hold `prev_logprobs`.

        A token gets the policy's log-probability plus the difference of its span. A sample that the teacher cannot
        read, because its tokens spell no text or are too many, gets the policy's log-probabilities.

        Returns:
            Metrics: the numbers of rows and of rows without a teacher, and the mean of `log p - log q` over the tokens
            that count.

        Raises:
            DataError: A sample has several responses.
        """
        tensors = batch.tensors
        indices = self.routes.rows_of(self.role, batch.rows)
        reader = TextReader(self.prompts, self.student, self.longest)
        read = {index: reader.read(tensors, index, batch.rows[index]) for index in indices}
        known = {index: row for index, row in read.items() if row is not None}
        metrics = {
            f"{self.role}/num_rows": float(len(indices)),
            f"{self.role}/num_unread": float(len(read) - len(known)),
        }
        if not indices:
            return metrics
        scores_RT = tensors["prev_logprobs"][indices]
        if known:
            found_RT = self.teacher.get_logprobs(batch_of([row.token_ids for row in known.values()]))["logprobs"]
            for place, (index, row) in enumerate(known.items()):
                row.add_differences(scores_RT[indices.index(index)], found_RT[place])
        return metrics | {f"{self.role}/reverse_kl": write_scores(tensors, scores_RT, indices, self.weight)}


@dataclass(frozen=True)
class TextReader:
    """Reads samples in the tokens of a teacher with another tokenizer."""

    prompts: TeacherPrompts
    """Prompts in the teacher's tokens."""
    student: TokenizerType
    """Tokenizer of the policy."""
    longest: int
    """Largest number of tokens of a row of the teacher."""

    def read(self, tensors: BatchedDataDict[Any], index: int, row: Trajectory | None) -> "TeacherRow | None":
        """Return a row of a batch in the teacher's tokens, or None if the teacher cannot read it.

        Raises:
            DataError: The sample has several responses, or its prompt is not that of its row.
        """
        assert row is not None, "written rows are read by WrittenReader"
        if sum("generation_logprobs" in message for message in row.message_log) != 1:
            raise DataError(
                f"row {row.idx}: a sample has several responses, or none. A teacher with another tokenizer compares "
                "single responses only; use a teacher with the policy's tokenizer."
            )
        prompt = self.prompts.ids(self.prompts.row_of(row))
        ids = tensors["input_ids"][index, row.prompt_length : row.length].tolist()
        return read_answer(prompt, row.prompt_length, ids, self.student, self.prompts.tokenizer, self.longest)


@dataclass(frozen=True)
class TeacherRow:
    """A row in the tokens of a teacher, with the spans of its answer."""

    token_ids: Tensor
    """`[t]` int64."""
    spans: Sequence[tuple[slice, slice]]
    """Positions in the student's row, and in `token_ids`, of each span."""

    def add_differences(self, scores_T: Tensor, teacher_T: Tensor) -> None:
        """Add to the student's log-probabilities of each span how much more the teacher's are, in place."""
        own_T = scores_T.clone()
        for student, teacher in self.spans:
            scores_T[student] += teacher_T[teacher].sum() - own_T[student].sum()


def read_answer(
    prompt: Tensor, start: int, answer: Sequence[int], student: TokenizerType, teacher: TokenizerType, longest: int
) -> TeacherRow | None:
    """Return an answer in the teacher's tokens, after a prompt.

    An end-of-sequence token of the student is that of the teacher, and a span of its own.

    Args:
        prompt: Token ids of the teacher's prompt, `[t]` int64.
        start: Position of the answer in the student's row.
        answer: Token ids of the student's answer.
        longest: Largest number of tokens of the teacher's row.

    Returns:
        The row. None if the answer is no text in UTF-8, if the teacher's tokens spell another text, or if the row is
        too long.
    """
    ends = bool(answer) and answer[-1] == student.eos_token_id
    own = [spelling(student)(token) for token in answer[: len(answer) - ends]]
    try:
        ids = encode_continuation(b"".join(own).decode(), teacher).tolist()
        spans = list(common_spans(own, _spelled(ids, teacher, b"".join(own))))
    except ValueError:  # including UnicodeDecodeError
        return None
    if ends:
        spans.append((slice(len(own), len(own) + 1), slice(len(ids), len(ids) + 1)))
        ids.append(teacher.eos_token_id)
    if len(prompt) + len(ids) > longest:
        return None
    moved = [(_moved(left, start), _moved(right, len(prompt))) for left, right in spans]
    return TeacherRow(torch.cat([prompt, torch.tensor(ids, dtype=torch.int64)]), moved)


@lru_cache(maxsize=8)
def spelling(tokenizer: TokenizerType) -> TokenBytes:
    """Return `token_bytes`, which is made once for each tokenizer."""
    return token_bytes(tokenizer)


def _spelled(ids: Sequence[int], tokenizer: TokenizerType, text: bytes) -> list[bytes]:
    """Return the bytes of tokens, without the space that a word mark at the beginning stands for."""
    spelled = [spelling(tokenizer)(token) for token in ids]
    if spelled and spelled[0].startswith(b" ") and not text.startswith(b" "):
        spelled[0] = spelled[0][1:]
    return spelled


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


@dataclass(frozen=True)
class WrittenReader:
    """Reads written rows of text in the tokens of a teacher with another tokenizer.

    The end of the sequence is that of the teacher, and a special token of both is itself. The teacher reads the names
    of all other special tokens, such as those of a chat template.
    """

    student: TokenizerType
    """Tokenizer of the policy."""
    teacher: TokenizerType
    longest: int
    """Largest number of tokens of a row of the teacher."""

    def read(self, tensors: BatchedDataDict[Any], index: int, row: Trajectory | None) -> TeacherRow | None:
        """Return a row of a batch in the teacher's tokens, or None if its tokens spell no text.

        Its spans are those whose tokens all count.
        """
        ids = tensors["input_ids"][index, : int(tensors["input_lengths"][index])].tolist()
        start = int(bool(ids) and ids[0] == self.student.bos_token_id)
        found = [self.teacher.bos_token_id] if begins_with_bos(self.teacher) else []
        spans: list[tuple[slice, slice]] = []
        for place, part in self._parts(ids, start):
            own = [spelling(self.student)(token) for token in part]
            alone = self._alone(part[0])
            try:
                others = [alone] if alone is not None else _encoded(b"".join(own), self.teacher, first=not found)
                pairs = _ONE if alone is not None else common_spans(own, _spelled(others, self.teacher, b"".join(own)))
                spans += [(_moved(left, place), _moved(right, len(found))) for left, right in pairs]
            except ValueError:  # including UnicodeDecodeError
                return None
            found += others
        counted = (tensors["token_mask"][index] != 0).tolist()
        kept = [(own, other) for own, other in spans if all(counted[own])]
        return TeacherRow(torch.tensor(found, dtype=torch.int64), kept) if len(found) <= self.longest else None

    def _alone(self, token: int) -> int | None:
        """Return the teacher's token for a special token of the policy, or None if there is none."""
        if token == self.student.eos_token_id:
            return int(self.teacher.eos_token_id)
        special = self.student.added_tokens_decoder.get(token)
        known = {each.content: number for number, each in self.teacher.added_tokens_decoder.items()}
        return None if special is None else known.get(special.content)

    def _parts(self, ids: Sequence[int], start: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the position and the tokens of each part: a special token that the teacher has, or those between."""
        for position in range(start, len(ids) + 1):
            ends = position == len(ids)
            if ends or self._alone(ids[position]) is not None:
                if position > start:
                    yield start, ids[start:position]
                if not ends:
                    yield position, ids[position : position + 1]
                start = position + 1


_ONE = ((slice(0, 1), slice(0, 1)),)


def _encoded(text: bytes, tokenizer: TokenizerType, *, first: bool) -> list[int]:
    """Return the tokens of a text, which is the beginning of a row or follows other tokens."""
    found: list[int] = (encode_text if first else encode_continuation)(text.decode(), tokenizer).tolist()
    return found
