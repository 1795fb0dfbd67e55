"""The models of the benchmark against TRL: larger ones are the same function."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import TinyShape, make_tiny_model

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools/benchmarks"


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch):
    """Load `tools/benchmarks/workloads.py` as a module; it imports its neighbours as a script does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import workloads

    yield workloads
    for name in ("workloads", "side_by_side", "make_tiny_chat_model", "follows_pattern"):
        sys.modules.pop(name, None)


def test_a_widened_model_is_the_same_function_and_trains_all_its_weights(workloads) -> None:
    small = make_tiny_model(
        "qwen2", TinyShape(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1)
    )
    for name, parameter in small.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    shape = TinyShape(hidden_size=128, intermediate_size=160, num_layers=3, num_heads=4, num_kv_heads=2)
    wide = workloads.widen(small, shape)
    ids = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = small(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(wide(ids).logits, expected, rtol=0, atol=1e-3)
    optimizer = torch.optim.AdamW(wide.parameters(), weight_decay=0.0)
    before = {name: weight.detach().clone() for name, weight in wide.named_parameters()}
    for _ in range(2):  # weights that do not reach the residual stream at first have a gradient after the first update
        optimizer.zero_grad()
        wide(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, weight in wide.named_parameters():
        assert (weight != before[name]).float().mean() > 0.9, name


def test_skewed_answers_average_a_quarter_of_the_longest(workloads) -> None:
    rng = workloads.random.Random(0)
    problems = [workloads.draw_count(rng) for _ in range(20_000)]
    lengths = [len(workloads.counted(problem)) + 1 for problem in problems]
    assert (min(lengths), max(lengths)) == (13, 251)
    assert 0.2 < sum(lengths) / len(lengths) / max(lengths) < 0.3
    assert workloads.counted(workloads.Problem("37>40=", 3)) == "38 39 40 \\boxed{3}"
    for problem in problems[:100]:
        first, last = map(int, problem.question.removesuffix("=").split(">"))
        assert last - first == problem.result


def test_an_instruction_comes_with_the_form_of_its_answers(workloads) -> None:
    from follows_pattern import follows

    rng = workloads.random.Random(0)
    patterns = {problem.question: problem.result for problem in (workloads.draw_instruction(rng) for _ in range(2_000))}

    def rewards(question: str, *answers: str) -> list[float]:
        return [follows(answer, {"answer": patterns[question]}) for answer in answers]

    words = "one two three four five six seven eight nine ten eleven twelve"
    assert rewards("Describe bread in at most 12 words.", words, f" {words}\n", f"{words} more", "Bread.") == [
        1,
        1,
        0,
        0,
    ]
    demand = "Describe the sea in one sentence without a comma."
    assert rewards(demand, "The sea is wide and deep.", "The sea, it is wide.", "It is wide. And it is deep.") == [
        1,
        0,
        0,
    ]
    assert rewards("Ask a question about music.", "Which music do you like?", "I like all music.") == [1, 0]
    demand = "Name 3 rivers, separated by commas, in one line."
    assert rewards(demand, "Nile, Rhine, Ob", "Nile, Rhine", "Nile,\nRhine, Ob") == [1, 0, 0]


def test_the_published_model_is_read_and_its_absence_names_the_command(workloads, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nemo_rl smollm2.*--published-model"):
        workloads.find_model("instructions", "135m", tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert workloads.find_model("instructions", "135m", tmp_path) == tmp_path
    with pytest.raises(SystemExit, match="uniform has no model of the size 135m. It has: 1m, 3m, 25m"):
        workloads.find_model("uniform", "135m", tmp_path)
    with pytest.raises(SystemExit, match="It has: 135m"):
        workloads.find_model("instructions", "1m", tmp_path)
