"""Rewards from several scores and from scores of steps: their sums, and the model's numbers by transformers."""

import asyncio
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.utils import create_env
from nemo_rl.kits.judges.reward_model import RewardModelEnvironment
from nemo_rl.kits.judges.score_forms import StepScores, form_of
from nemo_rl.models.huggingface.load import describe_scores, load_model_config, load_scoring_model, names_of_scores
from nemo_rl.utils.errors import ConfigError, DataError

TINY_CHAT = REPOSITORY_ROOT / "examples/assets/tiny-chat"
NAMES = ["helpfulness", "correctness", "verbosity"]


def saved(folder, names):
    """Save a sequence classifier with random weights and these scores, as run_rm.py writes it."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
    config = load_model_config(str(TINY_CHAT))
    describe_scores(config, names)
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForSequenceClassification.from_pretrained(TINY_CHAT, config=config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder / "policy/weights/model")
    tokenizer.save_pretrained(folder / "policy/weights/model")
    return folder


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("scores") / "step_3", NAMES)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("steps") / "step_3", [])


def section(folder, **keys):
    return {
        "model_name": str(TINY_CHAT),
        "checkpoint_path": str(folder),
        "precision": "float32",
        "batch_size": 8,
        "max_model_len": 96,
        "device": "cpu",
        **keys,
    }


def config_of(folder, **keys):
    return RewardModelEnvironmentConfig.build(**section(folder, **keys))


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHATS = [chat(f"{n}+{n + 3}=", ";".join(f"{n}+{k}={n + k}" for k in range(1 + n % 4))) for n in range(7, 30, 2)]
WEIGHTS = {"verbosity": -0.25, "helpfulness": 2.0}
PROCESS = {"reward_model_cfg": {"reward_model_type": "process"}, "step_separator": ";"}


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_CHAT)


def test_the_names_of_a_checkpoint_are_the_labels_of_its_model(scores, steps):
    folder = scores / "policy/weights/model"
    assert names_of_scores(load_model_config(str(folder))) == NAMES
    assert names_of_scores(load_model_config(str(steps / "policy/weights/model"))) == ["LABEL_0"]


def test_a_model_with_another_number_of_scores_is_refused(scores):
    folder = str(scores / "policy/weights/model")
    with pytest.raises(ConfigError, match=r"with 3 scores \(helpfulness, correctness, verbosity\), but a model with 1"):
        load_scoring_model(folder)
    assert load_scoring_model(folder, attributes=["a", "b", "c"]).score.out_features == 3


def test_a_reward_of_several_scores_is_their_weighted_sum_in_parts(scores, tokenizer):
    form = form_of(config_of(scores, attribute_weights=WEIGHTS), tokenizer, NAMES)
    assert form.reward([1.0, 5.0, 8.0]) == {"verbosity": -2.0, "helpfulness": 2.0}
    assert form.no_reward == {"verbosity": 0.0, "helpfulness": 0.0}


@pytest.mark.parametrize(
    ("kind", "want"), [("min", 0.2), ("mean", 0.5), ("product", 0.08), ("last", 0.5), ("each", 1.5)]
)
def test_a_reward_of_steps_is_a_function_of_their_probabilities(steps, tokenizer, kind, want):
    form = form_of(config_of(steps, **PROCESS, step_reward=kind), tokenizer, ["LABEL_0"])
    logits = [math.log(p / (1 - p)) for p in (0.8, 0.2, 0.5)]
    assert form.reward(logits) == pytest.approx(want)


def test_each_step_has_its_probability_at_its_end(steps, tokenizer):
    conversation = chat("1+2=", "1+2=3; ;so 3")
    form = form_of(config_of(steps, **PROCESS, step_reward="each"), tokenizer, ["LABEL_0"])
    found = form.step_rewards(conversation, [math.log(0.8 / 0.2), 0.0])
    assert [end for end, _ in found] == [6, 12]
    assert [reward for _, reward in found] == pytest.approx([0.8, 0.5])
    assert form_of(config_of(steps, **PROCESS), tokenizer, ["LABEL_0"]).step_rewards(conversation, [0.0, 0.0]) is None


def test_steps_are_read_from_the_last_message(steps, tokenizer):
    form = form_of(config_of(steps, **PROCESS), tokenizer, ["LABEL_0"])
    assert isinstance(form, StepScores)
    row = form.row_of(chat("1+2=", "1+2=3; so 3;"))
    assert tokenizer.decode(row.token_ids[row.ends[0] : row.ends[1]]) == " so 3;"
    with pytest.raises(DataError, match="has no steps"):
        form.row_of(chat("1+2=", " ; "))
    with pytest.raises(DataError, match="which reads 96"):
        form.row_of(chat("1+2=", "1" * 200))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "attribute_weights is empty, but the model has 3 scores: helpfulness, correctness, verbosity"),
        ({"attribute_weights": {"helpful": 1.0}}, "helpful: the model has no such score.*helpfulness"),
        ({"reward_model_cfg": {"attributes": ["a", "b"]}}, "names 2 scores, but the model has 3"),
        (PROCESS, "the model has 3 scores: helpfulness"),
    ],
)
def test_a_section_that_does_not_fit_the_scores_is_refused(scores, tokenizer, keys, reason):
    with pytest.raises(ConfigError, match=reason):
        RewardModelEnvironment.check_section(section(scores, **keys), "env.reward_model", tokenizer)
    with pytest.raises(ConfigError, match=reason):
        RewardModelEnvironment(section(scores, **keys))


def test_names_of_a_section_replace_those_of_the_model(scores, tokenizer):
    keys = {"reward_model_cfg": {"attributes": ["a", "b", "c"]}, "attribute_weights": {"b": 1.0}}
    RewardModelEnvironment.check_section(section(scores, **keys), "env.reward_model", tokenizer)


def test_metrics_are_those_of_total_rewards():
    environment = RewardModelEnvironment.__new__(RewardModelEnvironment)
    environment._passes = type("Passes", (), {"num_rows": 6, "num_passes": 2})()
    batch = BatchedDataDict(rewards=torch.tensor([[1.0, 2.0], [0.0, -1.0]]))
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert (metrics["score_mean"], metrics["score_max"], metrics["rows_per_pass"]) == (1.0, 3.0, 3.0)


def step_all(client, conversations):
    async def main():
        return await asyncio.gather(*(client.step(one, {"n": n}) for n, one in enumerate(conversations)))

    return asyncio.run(main())


LAYOUTS = {
    "packed": {},
    "padded": {"sequence_packing": {"enabled": False}},
    "budget": {"sequence_packing": {"enabled": False}, "dynamic_batching": {"enabled": True}},
}


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_components_are_the_models_scores_in_every_layout(scores, layout):
    keys = {"attribute_weights": WEIGHTS, "resources": {"ranks_per_node": 2}, **LAYOUTS[layout]}
    client = create_env("reward_model", section(scores, **keys), step_timeout_s=120.0)
    twice = [*CHATS, *CHATS[:3]]
    try:
        results = step_all(client, twice)
    finally:
        client.shutdown()
    folder = scores / "policy/weights/model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for conversation, result in zip(twice, results, strict=True):
        ids = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"][:-1]
        with torch.no_grad():
            want = dict(zip(NAMES, model(input_ids=torch.tensor([ids])).logits[0].tolist(), strict=True))
        assert result.reward == pytest.approx({n: w * want[n] for n, w in WEIGHTS.items()}, abs=1e-4)
    assert len({round(result.reward["helpfulness"], 4) for result in results}) > 5


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_have_the_scores_of_a_token_classifier_in_every_layout(steps, layout):
    client = create_env(
        "reward_model", section(steps, **PROCESS, step_reward="each", **LAYOUTS[layout]), step_timeout_s=120.0
    )
    try:
        *results, empty = step_all(client, [*CHATS, chat("1+1=", " ")])
    finally:
        client.shutdown()
    assert empty.reward is None and "has no steps" in empty.error
    folder = steps / "policy/weights/model"
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for (question, answer), result in zip(CHATS, results, strict=True):
        prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        ids, ends = tokenizer(prompt, add_special_tokens=False)["input_ids"], []
        for step in answer["content"].split(";"):
            ids += tokenizer(step + ";", add_special_tokens=False)["input_ids"]
            ends.append(len(ids) - 1)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, ends, 0]
        want = logits.sigmoid().tolist()
        assert [reward for _, reward in result.step_rewards] == pytest.approx(want, abs=1e-5)
        assert result.reward == pytest.approx(sum(want), abs=1e-5)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_megatron_core_gives_the_scores_of_the_other_backend(scores):
    pytest.importorskip("megatron.core")
    keys = {"attribute_weights": WEIGHTS}
    megatron = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}
    found = []
    for backend in ({}, megatron):
        client = create_env("reward_model", section(scores, **keys, **backend), step_timeout_s=120.0)
        try:
            found.append([result.reward for result in step_all(client, CHATS)])
        finally:
            client.shutdown()
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)
