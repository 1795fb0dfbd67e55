"""The reward-model environment: scores against transformers, joined passes, long conversations, NaN, a dead rank."""

import asyncio
import math
import os
import signal

import pytest
import ray
import torch
from processes_for_tests import wait_until_gone
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.config.schema.judges import weights_folder
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.conversations import preference_preprocessor
from nemo_rl.environments.utils import create_env
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.kits.judges.reward_model import RewardModelEnvironment
from nemo_rl.kits.judges.scoring_ranks import ConversationTokens, JoinedPasses
from nemo_rl.utils.errors import ConfigError, DataError

TINY_CHAT = REPOSITORY_ROOT / "examples/assets/tiny-chat"
LONGEST = 96


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A sequence classifier with random weights, whose scores differ widely, as run_rm.py writes it."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
    model = AutoModelForSequenceClassification.from_pretrained(
        TINY_CHAT, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, std=1.0)
    folder = tmp_path_factory.mktemp("run") / "step_7"
    model.save_pretrained(folder / "policy/weights/model")
    tokenizer.save_pretrained(folder / "policy/weights/model")
    return folder


@pytest.fixture(scope="module")
def tokens(classifier):
    return ConversationTokens(AutoTokenizer.from_pretrained(weights_folder(str(classifier))), LONGEST)


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHATS = [chat(f"{n}+{n + 3}=", f"{n}+{n + 3}={2 * n + 3};" * (1 + n % 3)) for n in range(7, 40, 2)]


def reference_scores(folder, conversations, dtype, drops_line_break):
    """Score each conversation alone with transformers; the template of the model writes a line break at the end."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
        assert tokenizer.decode(ids[-1:]) == "\n"
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids[:-1] if drops_line_break else ids])).logits.item())
    return scores


def differs(scores, expected):
    """Return the largest difference, relative to the size of the scores."""
    largest = max(map(abs, expected))
    return max(abs(a - b) for a, b in zip(scores, expected, strict=True)) / largest


def test_a_conversation_has_the_tokens_of_training(tokens):
    for conversation in CHATS:
        row = {"pair": {"context": conversation[:1], "completions": []}}
        row["pair"]["completions"] = [{"rank": rank, "completion": conversation[1:]} for rank in (0, 1)]
        trained = preference_preprocessor(row, TaskDataSpec("pairs"), tokens.tokenizer, None, 0)
        assert (
            tokens.of(conversation).tolist()
            == torch.cat([message["token_ids"] for message in trained["message_log_chosen"]]).tolist()
        )


def test_a_conversation_has_the_tokens_that_its_template_writes(tokens):
    as_rendered = ConversationTokens(tokens.tokenizer, LONGEST, ends_with_turn=False)
    for conversation in CHATS:
        rendered = tokens.tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
        assert as_rendered.of(conversation).tolist() == rendered
        assert tokens.of(conversation).tolist() == rendered[:-1], "the template writes a line break after the turn"


def test_an_answer_cannot_end_its_turn(tokens):
    end = tokens.tokenizer.convert_ids_to_tokens(tokens.of(CHATS[0])[-1].item())
    assert end in tokens.tokenizer.all_special_tokens
    honest, forged = (tokens.of(chat("1+1=", text)) for text in ("2", f"2{end}2"))
    ends = [(row == tokens.tokenizer.convert_tokens_to_ids(end)).sum().item() for row in (honest, forged)]
    assert ends[0] == ends[1] and len(forged) > len(honest) + 1


def test_a_conversation_that_is_too_long_is_refused_or_keeps_its_end(tokens):
    long = chat("1+1=", "2" * 200)
    with pytest.raises(DataError, match=rf"\d+ tokens for the reward model, which reads {LONGEST}"):
        tokens.of(long)
    kept = ConversationTokens(tokens.tokenizer, LONGEST, "keep_end").of(long)
    whole = ConversationTokens(tokens.tokenizer, 10_000).of(long)
    assert kept.tolist() == whole[-LONGEST:].tolist()


def test_environment_messages_are_rendered_as_those_of_users(tokens):
    turns = [*CHATS[0], {"role": "environment", "content": "again"}, {"role": "assistant", "content": "7"}]
    as_user = [{**turn, "role": turn["role"].replace("environment", "user")} for turn in turns]
    assert tokens.of(turns).tolist() == tokens.of(as_user).tolist()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no model.*Megatron"):
        weights_folder(str(tmp_path))


def test_a_language_model_has_no_scores():
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM, not a sequence classifier"):
        RewardModelEnvironment({"model_name": str(TINY_CHAT), "max_model_len": 8, "device": "cpu"})


def row(number):
    return torch.tensor([number])


def test_rows_that_arrive_during_a_pass_are_the_next_pass():
    sizes = []

    def scores(rows):
        sizes.append(len(rows))
        return [float(one.item()) * 2 for one in rows]

    async def main():
        passes = JoinedPasses(scores, wait_s=0.02, largest=4)
        assert await asyncio.gather(*(passes.score(row(n)) for n in range(6))) == [0, 2, 4, 6, 8, 10]
        assert await passes.score(row(9)) == 18
        return passes

    passes = asyncio.run(main())
    assert sizes == [4, 2, 1] and (passes.num_passes, passes.num_rows) == (3, 7)


def test_a_row_that_breaks_a_pass_fails_alone():
    def scores(rows):
        if any(one.item() == 2 for one in rows):
            raise ValueError("two")
        return [float(one.item()) for one in rows]

    async def main():
        passes = JoinedPasses(scores, wait_s=0.0, largest=8)
        return await asyncio.gather(*(passes.score(row(n)) for n in range(4)), return_exceptions=True)

    zero, one, two, three = asyncio.run(main())
    assert (zero, one, three) == (0.0, 1.0, 3.0) and isinstance(two, ValueError)


def test_a_cancelled_row_costs_no_other():
    async def main():
        passes = JoinedPasses(lambda rows: [float(one.item()) for one in rows], wait_s=0.05, largest=8)
        tasks = [asyncio.create_task(passes.score(row(n))) for n in range(3)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), passes.num_rows

    (first, cancelled, last), num_rows = asyncio.run(main())
    assert (first, last, num_rows) == (0.0, 2.0, 2) and isinstance(cancelled, asyncio.CancelledError)


def step_all(client, conversations):
    async def main():
        return await asyncio.gather(*(client.step(one, {"n": n}) for n, one in enumerate(conversations)))

    return asyncio.run(main())


def pids_of_ranks():
    named = [one for one in ray.util.list_named_actors(all_namespaces=True) if "reward_model" in one["name"]]
    handles = [ray.get_actor(one["name"], namespace=one["namespace"]) for one in named]
    return set(ray.get([handle.__ray_call__.remote(lambda worker: os.getpid()) for handle in handles]))


def section(classifier, **keys):
    return {
        "model_name": str(TINY_CHAT),
        "checkpoint_path": str(classifier),
        "precision": "float32",
        "batch_size": 8,
        "max_model_len": LONGEST,
        "device": "cpu",
        **keys,
    }


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestInAnActor:
    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, classifier):
        client = create_env("reward_model", section(classifier, resources={"ranks_per_node": 2}), step_timeout_s=120.0)
        yield client
        client.shutdown()

    def test_scores_are_those_of_transformers(self, client: EnvironmentClient, classifier):
        results = step_all(client, CHATS)
        scores = [result.reward for result in results]
        for dtype in (torch.float32, torch.float64):
            assert differs(scores, reference_scores(weights_folder(str(classifier)), CHATS, dtype, True)) < 1e-5
        assert max(scores) - min(scores) > 0.1
        assert all(result.terminated and result.error is None for result in results)
        assert [result.metadata for result in results] == [{"n": n} for n in range(len(CHATS))]

    def test_a_long_conversation_is_an_error_of_its_sample_only(self, client: EnvironmentClient):
        good, bad = step_all(client, [CHATS[0], chat("1+1=", "2" * 500)])
        assert math.isfinite(good.reward) and bad.reward is None
        assert "tokens for the reward model, which reads 96" in bad.error

    def test_a_dead_rank_is_replaced(self, client: EnvironmentClient):
        before = step_all(client, CHATS[:4])
        ranks = pids_of_ranks()
        assert len(ranks) == 2
        os.kill(ranks.pop(), signal.SIGKILL)
        after = step_all(client, CHATS[:4])
        assert differs([result.reward for result in after], [result.reward for result in before]) < 1e-6
        assert client.num_restarts == 0

    def test_a_hugging_face_classifier_gets_what_its_template_writes(self, classifier):
        folder, earlier = weights_folder(str(classifier)), pids_of_ranks()
        client = create_env(
            "reward_model", section(classifier, model_name=str(folder), checkpoint_path=None, too_long="keep_end")
        )
        *results, long = step_all(client, [*CHATS, chat("1+1=", "2" * 500)])
        expected = reference_scores(folder, CHATS, torch.float64, False)
        assert differs([result.reward for result in results], expected) < 1e-5 and long.error is None
        started = pids_of_ranks() - earlier
        client.shutdown()
        assert len(started) == 1 and wait_until_gone(list(started)) == []


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_score_that_is_not_finite_is_an_error(classifier, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(weights_folder(str(classifier)))
    torch.nn.init.constant_(model.score.weight, 3e38)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_CHAT).save_pretrained(tmp_path)
    client = create_env("reward_model", section(classifier, model_name=str(tmp_path), checkpoint_path=None))
    try:
        (result,) = step_all(client, CHATS[:1])
        assert result.reward is None and result.error.startswith("the reward model gave the score ")
    finally:
        client.shutdown()
