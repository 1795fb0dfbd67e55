"""Group the tokens of two tokenizers into classes, so that distributions over their vocabularies can be compared.

A class has the id of one of its teacher tokens. There are two kinds of classes:

    shared_tokens       tokens of both that spell the same bytes      13 ~ 13, others are in no class
    common_beginnings   tokens whose first part is the same           1 ~ 1, 10, 11 ... 19

In the second kind, a token that the other tokenizer does not have belongs to the class of its first part: the first
token by which the other tokenizer writes it, and so on until a token that both have. A token always begins with the
text of its class, so the class of the next token is known from the next text, whichever of the two models writes it.

Invariants: the end-of-sequence tokens of both are one class. Other special tokens are only in the class of a special
token with the same name.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl.algorithms.teaching.text_alignment import spelling
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.encoding import encode_continuation
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

NO_CLASS = -1
"""Entry of a token in no class."""
_TENSORS = ("indices", "weights", "teacher_classes")


@dataclass(frozen=True)
class Projection:
    """The classes of the tokens of a student and of a teacher. `Vs` and `Vt` are the numbers of their token ids."""

    indices: Tensor
    """`[Vs, k]` int64, up to k classes of each token of the student, or `NO_CLASS`."""
    weights: Tensor
    """`[Vs, k]` float32, share of the token's probability that each class gets."""
    teacher_classes: Tensor
    """`[Vt]` int64, class of each token of the teacher, or `NO_CLASS`."""

    @cached_property
    def representatives(self) -> tuple[Tensor, Tensor]:
        """Return for each class `[Vt]` the student's token with the largest weight, or -1, and the log of its weight.

        Of equal weights, the token with the smallest id is chosen.
        """
        flat, weights = self.indices.flatten(), self.weights.flatten()
        tokens = torch.arange(len(self.indices)).repeat_interleave(self.indices.shape[1])
        order = (flat >= 0).nonzero()[:, 0]
        order = order[weights[order].argsort(descending=True, stable=True)]
        order = order[flat[order].argsort(stable=True)]
        classes, counts = flat[order].unique_consecutive(return_counts=True)
        first = order[counts.cumsum(0) - counts]
        found = torch.full_like(self.teacher_classes, -1).index_copy_(0, classes, tokens[first])
        logs = torch.zeros(len(found)).index_copy_(0, classes, weights[first].log())
        return found, logs

    def save(self, path: Path) -> None:
        """Write the projection to a file in the format of safetensors."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        save_file({name: each.int() if each.dtype == torch.int64 else each for name, each in tensors.items()}, path)

    @classmethod
    def load(cls, path: str, num_student: int, num_teacher: int, key: str) -> "Projection":
        """Read a projection.

        Args:
            num_student: Number of token ids of the student.
            num_teacher: Number of token ids of the teacher.
            key: Key of the configuration that names the file, for messages.

        Raises:
            ConfigError: The file is no projection, or that of other tokenizers.
        """
        try:
            tensors = load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"{key}={path!r} cannot be read: {error}. Make it with tools/make_projection.py."
            ) from None
        if set(tensors) != set(_TENSORS):
            raise ConfigError(
                f"{key}={path!r} has the tensors {', '.join(sorted(tensors))}; a projection has {', '.join(_TENSORS)}. "
                "Make it with tools/make_projection.py."
            )
        found = cls(tensors["indices"].long(), tensors["weights"].float(), tensors["teacher_classes"].long())
        found._check(num_student, num_teacher, f"{key}={path!r}")
        return found

    def _check(self, num_student: int, num_teacher: int, what: str) -> None:
        sizes = (len(self.indices), len(self.teacher_classes))
        if sizes != (num_student, num_teacher) or self.indices.shape != self.weights.shape or self.indices.ndim != 2:
            raise ConfigError(
                f"{what} is for {sizes[0]} tokens of the student and {sizes[1]} of the teacher; these tokenizers have "
                f"{num_student} and {num_teacher}. Make it again with tools/make_projection.py."
            )
        for classes in (self.indices, self.teacher_classes):
            if classes.numel() and not (classes.min() >= NO_CLASS and classes.max() < num_teacher):
                raise ConfigError(f"{what} has classes that are no token ids of the teacher. Make it again.")
        used = self.indices >= 0
        if not bool(((self.weights > 0) & (self.weights <= 1))[used].all()):
            raise ConfigError(f"{what} has weights outside of (0, 1]. Make it again.")


def num_ids(tokenizer: TokenizerType) -> int:
    """Return the number of token ids of a tokenizer, which is one more than its largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def shared_tokens(student: TokenizerType, teacher: TokenizerType) -> Projection:
    """Return the classes of tokens that spell the same bytes."""
    by_text = _ids_by_text(teacher)
    classes = {token: by_text[text] for token, text in _texts(student).items() if text in by_text}
    known = set(classes.values())
    of_teacher = {token: by_text[text] for token, text in _texts(teacher).items() if by_text[text] in known}
    return _projection(student, teacher, classes, of_teacher)


def common_beginnings(student: TokenizerType, teacher: TokenizerType) -> Projection:
    """Return the classes of tokens with the same first part."""
    texts, others = _texts(student), _texts(teacher)
    to_teacher, to_student = first_tokens(texts, teacher), first_tokens(others, student)
    classes: dict[int, int] = {}
    for token in sorted(texts, key=lambda each: len(texts[each])):  # beginnings come before the tokens they begin
        theirs = to_teacher.get(token)
        mine = None if theirs is None else to_student.get(theirs)
        if theirs is None or mine is None:
            continue
        if texts[token] == others[theirs] == texts[mine]:
            classes[token] = theirs
        elif mine in classes:
            classes[token] = classes[mine]
    of_teacher = {token: classes[mine] for token, mine in to_student.items() if mine in classes}
    return _projection(student, teacher, classes, of_teacher)


def first_tokens(texts: Mapping[int, bytes], tokenizer: TokenizerType) -> dict[int, int]:
    """Return the first token by which a tokenizer writes each text. Texts that it cannot begin are left out.

    Args:
        texts: Bytes by key. Bytes that are no text begin with the longest token that they start with.
    """
    by_text, spell = _ids_by_text(tokenizer), spelling(tokenizer)
    longest = max(map(len, by_text), default=0)
    found: dict[int, int] = {}
    for key, text in texts.items():
        try:
            first = int(encode_continuation(text.decode(), tokenizer)[0])
        except (UnicodeDecodeError, IndexError):
            first = -1
        if first < 0 or not text.startswith(spell(first)) or not spell(first):
            beginnings = (text[:length] for length in range(min(len(text), longest), 0, -1))
            first = next((by_text[each] for each in beginnings if each in by_text), -1)
        if first >= 0:
            found[key] = first
    return found


def _texts(tokenizer: TokenizerType) -> dict[int, bytes]:
    """Return the bytes of all ordinary tokens that have any."""
    spell, special = spelling(tokenizer), tokenizer.added_tokens_decoder
    found = {token: spell(token) for token in sorted(tokenizer.get_vocab().values()) if token not in special}
    return {token: text for token, text in found.items() if text}


def _ids_by_text(tokenizer: TokenizerType) -> dict[bytes, int]:
    """Return the smallest id of the ordinary tokens that spell each text."""
    return {text: token for token, text in reversed(_texts(tokenizer).items())}


def _projection(
    student: TokenizerType, teacher: TokenizerType, classes: dict[int, int], of_teacher: dict[int, int]
) -> Projection:
    """Return a projection with one class for each token, after adding those of special tokens."""
    theirs = {token.content: number for number, token in teacher.added_tokens_decoder.items()}
    same = {n: theirs[token.content] for n, token in student.added_tokens_decoder.items() if token.content in theirs}
    ends = {student.eos_token_id: teacher.eos_token_id}
    same = {n: other for n, other in same.items() if n not in ends and other not in ends.values()} | ends
    classes, of_teacher = classes | same, of_teacher | {other: other for other in same.values()}
    indices = torch.full((num_ids(student), 1), NO_CLASS)
    indices[list(classes), 0] = torch.tensor(list(classes.values()))
    teacher_classes = torch.full((num_ids(teacher),), NO_CLASS)
    teacher_classes[list(of_teacher)] = torch.tensor(list(of_teacher.values()))
    found = Projection(indices, torch.ones(indices.shape), teacher_classes)
    logger.info(
        "%d of %d tokens of the student and %d of %d of the teacher are in %d classes.",
        len(classes),
        len(student.get_vocab()),
        len(of_teacher),
        len(teacher.get_vocab()),
        len(set(classes.values())),
    )
    return found


def identity(tokenizer: TokenizerType) -> Projection:
    """Return the classes of two equal tokenizers: each token is its own class."""
    ids = torch.arange(num_ids(tokenizer))
    return Projection(ids[:, None], torch.ones(len(ids), 1), ids)


KINDS: Mapping[str, Callable[[TokenizerType, TokenizerType], Projection]] = {
    "shared_tokens": shared_tokens,
    "common_beginnings": common_beginnings,
}
"""Kinds of classes by name."""
