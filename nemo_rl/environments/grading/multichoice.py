"""Grade multiple choice by the letter after the last "Answer:" (or the answer word of one of 15 languages).

Letters may be Latin (also full-width), Arabic or Bengali; all letters are compared as Latin. An answer without a letter
after an answer word is wrong, not an error.
"""

import re

from nemo_rl.environments.grading.grade import VerifierResult

_BEFORE_LETTER = r"(?:\\boxed\{|[*($（\s])*"
_ENGLISH = re.compile(rf"answer\**\s*:{_BEFORE_LETTER}([A-Z])(?![A-Za-z])", re.IGNORECASE)

_ANSWER_WORDS = (
    "answer",
    "antwort",  # German
    "respuesta",  # Spanish
    "réponse",  # French
    "risposta",  # Italian
    "resposta",  # Portuguese
    "jawaban",  # Indonesian
    "jibu",  # Swahili
    "idahun",  # Yoruba
    "ìdáhùn",
    "ìdáhún",
    "الإجابة",  # Arabic
    "الاجابة",
    "الجواب",
    "إجابة",
    "উত্তর",  # Bengali
    "उत्तर",  # Hindi
    "答案",  # Chinese
    "答え",  # Japanese
    "回答",
    "解答",
    "정답",  # Korean
    "답변",
    "답",
)
_ALPHABETS = ("أبجد", "ابجد", "অবডঢ", "কখগঘ", "ＡＢＣＤＥＦＧＨＩＪ")
_FOREIGN_LETTERS = {
    ord(letter): latin for alphabet in _ALPHABETS for letter, latin in zip(alphabet, "ABCDEFGHIJ", strict=False)
}
_MULTILINGUAL = re.compile(
    rf"(?:{'|'.join(_ANSWER_WORDS)})\**\s*[:：ঃ]{_BEFORE_LETTER}"
    rf"([A-Za-z{''.join(_ALPHABETS)}])(?![A-Za-z])",
    re.IGNORECASE,
)


def verify_english(response: str, ground_truth: str) -> VerifierResult:
    """Compare the letter of the last `Answer: X` with the ground truth letter."""
    return _compare(_ENGLISH, response, ground_truth)


def verify_multilingual(response: str, ground_truth: str) -> VerifierResult:
    """Compare the letter after the last answer word of any known language."""
    return _compare(_MULTILINGUAL, response, ground_truth)


def _compare(pattern: re.Pattern[str], response: str, ground_truth: str) -> VerifierResult:
    """Return reward 1.0 if the last letter that the pattern finds equals the ground truth's letter, or else 0.0."""
    letters = pattern.findall(response)
    if not letters:
        return VerifierResult(0.0, None)
    answer = _latin(letters[-1])
    return VerifierResult(float(answer == _latin(ground_truth)), answer)


def _latin(letter: str) -> str:
    return letter.strip().translate(_FOREIGN_LETTERS).upper()
