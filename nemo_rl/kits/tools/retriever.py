"""Retrieve documents from a local corpus by BM25, as a tool and as an environment.

`RAGEnvironment` answers queries between `<retrieve>` and `</retrieve>`, and has the configuration keys of NeMo RL.
`RetrieverTools` offers the same index as a tool for models that call tools. Invariant: a process builds an index once,
and documents are returned in the order of their scores.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from nemo_rl.config import DatasetConfig
from nemo_rl.config.schema.kits import RAGEnvironmentConfig
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.data.datasets.rows.readers import is_file_path
from nemo_rl.data.messages.content import content_text, texts_between
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.kits.tools.grader import Grader, check_grader
from nemo_rl.kits.tools.interfaces import EpisodeTools
from nemo_rl.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

RAGEnvConfig = RAGEnvironmentConfig
"""Name of this section's class in NeMo RL."""

_BEGIN, _END = "<retrieve>", "</retrieve>"


class BM25Retriever:
    """Index of documents, which is searched by words.

    The score of a document is the sum over the words of the query of `idf * tf / (tf + k1 * (1 - b + b * length / mean
    length))` with `idf = ln(1 + (N - n + 0.5) / (n + 0.5))` (Robertson and Zaragoza 2009, in the form of Lucene). Words
    are converted to lower case. Words of one character and common English words are left out.

    Args:
        num_result: number of documents for each query.
        k1: parameter of BM25 that says how fast the weight of a repeated word saturates.
        b: parameter of BM25 from 0 to 1 that says how much long documents are penalised.
        device: must be "cpu"; the index is computed with numpy.

    Raises:
        ConfigError: the package bm25s is not installed, or `device` is not "cpu".
        DataError: there are no documents.
    """

    def __init__(
        self,
        documents: list[str] | None = None,
        num_result: int = 10,
        k1: float = 1.5,
        b: float = 0.75,
        device: str = "cpu",
    ) -> None:
        if device != "cpu":
            raise ConfigError(f"the retriever's device={device!r} is not available: its index is computed on the cpu.")
        if not documents:
            raise DataError("the retriever has no documents: its data set is empty.")
        self.documents = documents
        self.num_result = num_result
        self._parameters = {"k1": k1, "b": b}
        self._index: Any = None
        self._lock = threading.Lock()

    def build_index(self) -> None:
        """Build the index, unless it is built already."""
        bm25s = _library()
        with self._lock:
            if self._index is None:
                index = bm25s.BM25(method="lucene", backend="numpy", **self._parameters)
                index.index(bm25s.tokenize(self.documents, show_progress=False), show_progress=False)
                self._index = index

    def ranking(self, query: str) -> list[tuple[int, float]]:
        """Return index and score of the best documents, without documents that have no word of the query."""
        self.build_index()
        words = _library().tokenize([query], show_progress=False, return_ids=False)[0]
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[: self.num_result]
        return [(int(position), float(scores[position])) for position in best if scores[position] > 0]

    def __call__(self, query: str) -> list[str]:
        """Return the best documents for a query, the best one first."""
        return [self.documents[position] for position, _ in self.ranking(query)]


class RetrieverTools(EpisodeTools):
    """The tool `retrieve`.

    Args:
        **keys: keys of `env.rag`, such as dataset_name and num_results.

    Raises:
        ConfigError, DataError: a key is wrong, or the documents cannot be read.
    """

    def __init__(self, **keys: Any) -> None:
        self._retriever = retriever_of(RAGEnvironmentConfig.build(**keys))

    def retrieve(self, query: str) -> str:
        """Search documents that contain the words of a query.

        Args:
            query: words to look for.
        """
        return format_documents(self._retriever(query))


class RAGEnvironment(EnvironmentInterface[dict[str, Any]]):
    """An environment that answers queries with documents, and lets another environment grade the final answer.

    A response with `<retrieve>query</retrieve>` is answered with documents, and another turn follows; any other
    response ends the episode.

    Args:
        cfg: the `env.rag` section (or its dict).
    """

    def __init__(self, cfg: RAGEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, RAGEnvironmentConfig) else RAGEnvironmentConfig.build(**cfg)
        self._retriever = retriever_of(self.cfg)
        self._grader = None if self.cfg.grader is None else Grader(self.cfg.grader)

    gives_answers: ClassVar[bool] = True
    config_class: ClassVar[type | None] = RAGEnvironmentConfig

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the grader, and the documents if data is read (`EnvironmentInterface.check_section`)."""
        cfg = RAGEnvironmentConfig.of(section)
        check_grader(cfg.grader, f"{place}.grader", tokenizer)
        if tokenizer is not None:
            retriever_of(cfg)

    def format_result(self, retrieved_docs: list[str]) -> str:
        """Return documents as the text of an observation."""
        return format_documents(retrieved_docs)

    def step(
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Answer or grade B conversations."""
        turns = [self._turn(log, state) for log, state in zip(message_log_batch, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[turn.observations[0] for turn in turns],
            metadata=[turn.metadata[0] for turn in turns],
            next_stop_strings=[None] * len(turns),
            rewards=torch.stack([_total(turn) for turn in turns]),
            terminateds=torch.stack([torch.as_tensor(turn.terminateds[0]) for turn in turns]),
            answers=[turn.answers[0] if turn.answers else None for turn in turns],
            errors=[turn.errors[0] if turn.errors else None for turn in turns],
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Count queries over B samples, and add the grader's metrics."""
        graded, metrics = (batch, {}) if self._grader is None else self._grader.post_process(batch)
        queries = [
            sum(_query_of(message) is not None for message in log if message["role"] == "assistant")
            for log in batch["message_log"]
        ]
        return graded, {**metrics, "num_queries": sum(queries), "mean_queries": sum(queries) / max(len(queries), 1)}

    def shutdown(self) -> None:
        """Release the grader."""
        if self._grader is not None:
            self._grader.shutdown()

    def _turn(self, log: "LLMMessageLogType", state: dict[str, Any]) -> EnvironmentReturn[Any]:
        query = _query_of(log[-1])
        if query is not None:
            text = self.format_result(self._retriever(query))
            return _answered(state, text, done=False)
        if self._grader is None:
            return _answered(state, "", done=True)
        graded: EnvironmentReturn[Any] = self._grader.step(log, state)
        return graded


def retriever_of(config: RAGEnvironmentConfig) -> BM25Retriever:
    """Return the retriever of a section. Equal sections share one index.

    Raises:
        DataError: the documents cannot be read.
    """
    try:
        return _retriever(
            config.dataset_name,
            config.dataset_split,
            config.text_column,
            config.num_results,
            config.k1,
            config.b,
            config.device,
        )
    except (ConfigError, DataError) as error:
        raise DataError(f"env.rag.dataset_name={config.dataset_name!r}: {error}") from error


def format_documents(documents: Sequence[str]) -> str:
    """Return documents as one numbered text."""
    if not documents:
        return "<result>\nno document\n</result>"
    listed = "\n".join(f"{number}. {text.strip()}" for number, text in enumerate(documents, 1))
    return f"<result>\n{listed}\n</result>"


@lru_cache(maxsize=4)
def _retriever(name: str, split: str, column: str, num_results: int, k1: float, b: float, device: str) -> BM25Retriever:
    entry = DatasetConfig.of({"data_path": name, "split": None if is_file_path(name) else split})
    table = load_table(entry, "train", HubSource(None, section="env.rag"))
    texts = [row.get(column) for row in table.rows]
    missing = sum(not isinstance(text, str) for text in texts)
    if missing:
        raise DataError(f"env.rag: {missing} of {len(texts)} rows of {name!r} have no text in column {column!r}.")
    retriever = BM25Retriever([str(text) for text in texts], num_results, k1, b, device)
    retriever.build_index()
    return retriever


def _query_of(message: Mapping[str, Any]) -> str | None:
    """Return the last query of a response, even if the stop string removed its closing tag."""
    text = content_text(message["content"])
    found = texts_between(text + _END if _BEGIN in text and _END not in text else text, _BEGIN, _END)
    return found[-1].strip() if found else None


def _answered(state: dict[str, Any], text: str, *, done: bool) -> EnvironmentReturn[Any]:
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": text}],
        metadata=[state],
        next_stop_strings=[None],
        rewards=torch.zeros(1),
        terminateds=torch.tensor([done]),
    )


def _total(turn: EnvironmentReturn[Any]) -> torch.Tensor:
    """Return the reward of one sample as the sum of its components."""
    if isinstance(turn.rewards, dict):
        return torch.stack([torch.as_tensor(value[0]).float() for value in turn.rewards.values()]).sum()
    return torch.as_tensor(turn.rewards[0]).float()


def _library() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError("the retriever needs the package bm25s: install the extra retriever.") from error
    return bm25s
