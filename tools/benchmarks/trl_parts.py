"""What TRL's sides of the comparisons share: the rule that rewards an answer, the clock and the record of generation.

Their environments have TRL and not nemo_rl.
"""

import re
import statistics
import time
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

BOXED_INTEGER = re.compile(r"\\boxed\{(-?\d+)\}")


def boxed_reward(text: str, truth: str) -> float:
    """Return 1 where the last boxed integer of a text is the right one, else 0."""
    boxes = BOXED_INTEGER.findall(text)
    return float(bool(boxes) and int(boxes[-1]) == int(truth))


def boxed_answer_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    r"""Return 1 where the last boxed integer of a completion is the answer, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [boxed_reward(text, truth) for text, truth in zip(texts, answer, strict=True)]


class GenerationClock:
    """Measures seconds in a model's generation method since the last `take`.

    Args:
        model: the model in training; its method is replaced by a timed one.
        method: "generate", or "generate_batch" for continuous batching.
    """

    def __init__(self, model: PreTrainedModel, method: str):
        self._seconds = 0.0
        generate = getattr(model, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - started

        setattr(model, method, timed)

    def take(self) -> float:
        """Return the seconds since the last call of `take`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class AnswerRecord:
    """Rewards and counts what `generate` returns, for trainers that report neither.

    Args:
        model: the model in training; its `generate` is replaced by one that records.
        tokenizer: its tokenizer.
        answers: the right integer of each prompt, by the prompt's text with its special tokens.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]):
        self._tokenizer = tokenizer
        self._answers = answers
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._num_tokens = 0
        generate = model.generate

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            sequences = found if hasattr(found, "shape") else found.sequences
            for row, mask in zip(sequences.tolist(), kwargs["attention_mask"].tolist(), strict=True):
                prompt = [token for token, is_real in zip(row[: len(mask)], mask, strict=True) if is_real]
                self._record(prompt, row[len(mask) :])
            return found

        model.generate = recorded

    def _record(self, prompt: list[int], answer: list[int]) -> None:
        end = self._tokenizer.eos_token_id
        length = answer.index(end) + 1 if end in answer else len(answer)
        text = self._tokenizer.decode(answer[:length], skip_special_tokens=True)
        self._rewards.append(boxed_reward(text, self._answers[self._tokenizer.decode(prompt)]))
        self._lengths.append(length)
        self._num_tokens += len(prompt) + length

    def take(self) -> dict[str, float]:
        """Return the figures of the answers since the last call, in the keys that `grpo_vs_trl.read_trl` reads."""
        figures = {
            "reward": statistics.mean(self._rewards),
            "mean_gen_tokens": statistics.mean(self._lengths),
            "max_gen_tokens": max(self._lengths),
            "num_tokens_so_far": self._num_tokens,
        }
        self._rewards, self._lengths = [], []
        return figures
