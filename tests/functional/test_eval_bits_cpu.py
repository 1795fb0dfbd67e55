"""With `generation.zero_mismatch`, the same checkpoint gets the same answers, in all bits, however it is evaluated."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from example_runs import run_eval

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

NUM_PROBLEMS = 24
ONE_BY_ONE = "generation.num_prompts_per_step=1"
EACH_WAY = {
    "one by one": (ONE_BY_ONE,),
    "in batches": ("generation.num_prompts_per_step=7",),
    "on two engines": ("cluster.ranks_per_node=2",),
    "in another order": ("data.dataset_name={shuffled}", "generation.num_prompts_per_step=5"),
    "with a small cache": ("generation.engine.kv_cache_memory_mb=1",),
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sums, two of which are equal, in two orders."""
    folder, rng = tmp_path_factory.mktemp("problems"), random.Random(0)
    sums = [(rng.randrange(10, 99), rng.randrange(10, 99)) for _ in range(NUM_PROBLEMS - 1)]
    rows = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a, b in [*sums, sums[3]]]
    for name, order in {"sorted": rows, "shuffled": rng.sample(rows, len(rows))}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in order))
    return folder


def evaluated(folder: Path, problems: Path, *overrides: str) -> tuple[float, list[tuple[Any, ...]]]:
    """Return the score, and each answer with its log-probability, in an order that does not depend on the rows."""
    folder.mkdir()
    named = [each.format(shuffled=problems / "shuffled.jsonl") for each in overrides]
    status, output = run_eval(
        folder,
        *(f"data.dataset_name={problems / 'sorted.jsonl'}", "data.problem_key=problem", "data.solution_key=answer"),
        *("generation.max_new_tokens=48", "generation.backend=hf", "generation.engine.precision=bfloat16"),
        *("generation.zero_mismatch=true", *named),
    )
    assert status == 0, output[-3000:]
    stored = folder / "results/eval_cpu"
    lines = [json.loads(line) for line in (stored / "evaluation_data.jsonl").read_text().splitlines()]
    answers = [(line["prompt"], line["response"], line["logprob"], line["reward"]) for line in lines]
    return json.loads((stored / "results.json").read_text())["score"]["value"], sorted(answers)


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_sampled_answers_have_the_same_bits_in_each_way(backend: str, problems: Path, tmp_path: Path) -> None:
    engine = f"generation.backend={backend}"
    score, answers = evaluated(tmp_path / "all", problems, engine)
    assert len(answers) == 4 * NUM_PROBLEMS and len({response for _, response, _, _ in answers}) > NUM_PROBLEMS
    assert 0 < score < 1 and all(logprob < 0 for _, _, logprob, _ in answers)
    for number, (name, overrides) in enumerate(EACH_WAY.items()):
        assert evaluated(tmp_path / str(number), problems, engine, *overrides) == (score, answers), name


def test_greedy_answers_have_the_same_bits_in_each_way(problems: Path, tmp_path: Path) -> None:
    greedy = ("generation.temperature=0", "eval.num_tests_per_prompt=1")
    whole = evaluated(tmp_path / "all", problems, *greedy)
    for number, name in enumerate(("one by one", "in another order")):
        assert evaluated(tmp_path / str(number), problems, *greedy, *EACH_WAY[name]) == whole, name


def test_another_seed_gives_other_answers(problems: Path, tmp_path: Path) -> None:
    """The comparison of the other tests sees a difference."""
    first, second = (evaluated(tmp_path / str(seed), problems, f"eval.seed={seed}")[1] for seed in (42, 43))
    assert [prompt for prompt, *_ in first] == [prompt for prompt, *_ in second]
    assert sum(one != other for one, other in zip(first, second, strict=True)) > NUM_PROBLEMS
