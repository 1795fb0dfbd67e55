"""The retriever ranks like an independent BM25 in float64, on its own documents and on the Cranfield collection."""

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN

from nemo_rl.kits.tools.retriever import BM25Retriever, RAGEnvironment, RetrieverTools, format_documents
from nemo_rl.utils.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[4]
CRANFIELD = ROOT / "../shared/data/cranfield"
NQ_OPEN = ROOT / "../shared/data/nq_open/NQ-open.dev.jsonl.gz"
DOCUMENTS = [
    "The cat sat on the mat.",
    "A dog chased the cat, and the cat ran away from the dog.",
    "Birds sing in the morning.",
    "Rivers flow to the sea; the sea is salty.",
]


class ReferenceBM25:
    """BM25 in float64, written from its formula."""

    def __init__(self, documents: Sequence[str], k1: float, b: float) -> None:
        self.counts = [Counter(words_of(text)) for text in documents]
        self.lengths = np.array([sum(count.values()) for count in self.counts], dtype=np.float64)
        self.frequency = Counter(word for count in self.counts for word in count)
        self.k1, self.b = k1, b

    def scores(self, query: str) -> np.ndarray:
        scores = np.zeros(len(self.counts))
        norm = self.k1 * (1 - self.b + self.b * self.lengths / self.lengths.mean())
        for word in words_of(query):
            found = self.frequency[word]
            idf = math.log(1 + (len(self.counts) - found + 0.5) / (found + 0.5))
            tf = np.array([count[word] for count in self.counts], dtype=np.float64)
            scores += idf * tf / (tf + norm)
        return scores


def words_of(text: str) -> list[str]:
    return [word for word in re.findall(r"\b\w\w+\b", text.lower()) if word not in STOPWORDS_EN]


def recall(rankings: Sequence[Sequence[int]], relevant: Sequence[set[int]], depth: int) -> float:
    shares = [len(truth & set(ranks[:depth])) / len(truth) for ranks, truth in zip(rankings, relevant, strict=True)]
    return sum(shares) / len(shares)


def cranfield() -> tuple[list[str], list[str], list[set[int]]]:
    """Return documents, queries and the positions of relevant documents."""
    text = gzip.decompress((CRANFIELD / "cran.all.1400.xml.gz").read_bytes()).decode()
    documents = [" ".join(re.findall(r"<(?:title|text)>(.*?)</", doc, re.DOTALL)) for doc in text.split("<doc>")[1:]]
    numbers = [int(number) for number in re.findall(r"<docno>\s*(\d+)\s*</docno>", text)]
    topics = gzip.decompress((CRANFIELD / "cran.qry.xml.gz").read_bytes()).decode().split("<top>")[1:]
    queries = [re.findall(r"<title>(.*?)</title>", topic, re.DOTALL)[0].strip() for topic in topics]
    relevant: list[set[int]] = [set() for _ in queries]
    place = {number: position for position, number in enumerate(numbers)}
    for line in (CRANFIELD / "cranqrel.trec.txt").read_text(encoding="utf-8").splitlines():
        topic, _, number, grade = line.split()
        if int(grade) > 0 and int(number) in place:
            relevant[int(topic) - 1].add(place[int(number)])
    kept = [row for row, truth in enumerate(relevant) if truth]
    return documents, [queries[row] for row in kept], [relevant[row] for row in kept]


@pytest.mark.fast
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (2.0, 0.0), (1.2, 1.0)])
def test_scores_equal_the_formula(k1: float, b: float) -> None:
    retriever = BM25Retriever(DOCUMENTS, 4, k1, b)
    reference = ReferenceBM25(DOCUMENTS, k1, b)
    for query in ("cat", "the cat and the dog", "salty sea", "cat cat river rivers"):
        expected = reference.scores(query)
        found = retriever.ranking(query)
        assert [position for position, _ in found] == [
            n for n in np.argsort(-expected, kind="stable") if expected[n] > 0
        ]
        for position, score in found:
            assert score == pytest.approx(expected[position], rel=1e-5)


@pytest.mark.fast
def test_a_query_without_known_words_finds_nothing_and_the_number_is_kept() -> None:
    retriever = BM25Retriever(DOCUMENTS, num_result=1)
    assert retriever("zebra") == retriever("") == []
    assert retriever("dog cat") == [DOCUMENTS[1]]
    with pytest.raises(DataError, match="no documents"):
        BM25Retriever([])
    with pytest.raises(ConfigError, match="device='cuda'"):
        BM25Retriever(DOCUMENTS, device="cuda")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return path


@pytest.mark.fast
def test_the_environment_answers_queries_and_grades_the_rest(corpus: Path) -> None:
    keys = {"dataset_name": str(corpus), "text_column": "body", "num_results": 1}
    environment = RAGEnvironment({**keys, "grader": {"name": "math", "kwargs": {"num_workers": 1}}})
    logs = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        for text in ("I look: <retrieve>salty sea", "<retrieve>zebra</retrieve>", "\\boxed{3}", "\\boxed{4}")
    ]
    result = environment.step(logs, [{"ground_truth": "3"}] * 4)
    environment.shutdown()
    assert result.terminateds.tolist() == [False, False, True, True]
    assert result.rewards.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert result.observations[0]["content"] == format_documents([DOCUMENTS[3]])
    assert "no document" in result.observations[1]["content"]
    assert RetrieverTools(**keys).retrieve("dog") == format_documents([DOCUMENTS[1]])


@pytest.mark.fast
def test_a_wrong_column_is_named(corpus: Path) -> None:
    with pytest.raises(DataError, match="4 of 4 rows .* have no text in column 'text'"):
        RAGEnvironment({"dataset_name": str(corpus)})


@pytest.mark.skipif(not CRANFIELD.is_dir(), reason="the Cranfield collection is not there")
def test_recall_on_cranfield_equals_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    documents, queries, relevant = cranfield()
    assert len(documents) == 1400
    retriever, reference = BM25Retriever(documents, 100), ReferenceBM25(documents, 1.5, 0.75)
    found, expected = [], []
    for query in queries:
        ranking = retriever.ranking(query)
        scores = reference.scores(query)
        found.append([position for position, _ in ranking])
        expected.append(np.argsort(-scores, kind="stable")[:100].tolist())
        np.testing.assert_allclose([score for _, score in ranking], scores[found[-1]], rtol=1e-4)
    for depth in (10, 100):
        ours, theirs = recall(found, relevant, depth), recall(expected, relevant, depth)
        with capsys.disabled():
            print(f"\ncranfield recall@{depth}: {ours:.4f}, reference {theirs:.4f}, {len(queries)} queries")  # noqa: T201
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert recall(found, relevant, 100) > 0.6


@pytest.mark.skipif(not NQ_OPEN.is_file(), reason="NQ-open is not there")
def test_each_question_of_nq_open_finds_itself() -> None:
    rows = [json.loads(line) for line in gzip.decompress(NQ_OPEN.read_bytes()).splitlines()]
    questions = [row["question"] for row in rows]
    retriever = BM25Retriever(questions, 5)
    asked = [number for number in range(0, len(questions), 20) if words_of(questions[number])]
    hits = sum(questions[number] in retriever(questions[number]) for number in asked)
    assert hits / len(asked) > 0.98
    assert bm25s.__version__
