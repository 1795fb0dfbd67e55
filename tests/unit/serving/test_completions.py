"""OpenAI's package gets the tokens that the library of the Tinker API gets."""

import openai
import pytest
from fake_models import FakeModels
from running import Raw, config_in, service

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.data.tokenizer import get_tokenizer

ROWS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    tokenizer = get_tokenizer({"name": str(REPOSITORY_ROOT / "examples/assets/tiny-chat"), "chat_template": "default"})
    models = FakeModels(vocab=len(tokenizer), eos=tokenizer.eos_token_id)
    with service(models, config_in(tmp_path_factory.mktemp("oai")), tokenizer) as url:
        yield url, tokenizer


def test_a_checkpoint_gives_the_same_tokens_in_both_forms(running):
    url, _ = running
    client = Raw(url)
    session = client.session()
    model = client.model(session)
    client.submit_pass(model, 1, ROWS)
    client.ok("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})
    saved = client.ok("save_weights_for_sampler", model_id=model, seq_id=3, path="x")
    path = client.result(saved["request_id"])["path"]
    sampler = client.ok("create_sampling_session", session_id=session, sampling_session_seq_id=5, model_path=path)[
        "sampling_session_id"
    ]
    prompt, sampling = {"chunks": [{"tokens": [1, 2]}]}, {"max_tokens": 8, "seed": 3}
    made = client.ok(
        "asample", sampling_session_id=sampler, seq_id=1, num_samples=2, prompt=prompt, sampling_params=sampling
    )
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-test") as other:
        answer = other.completions.create(
            model=path, prompt=[1, 2], max_tokens=8, seed=3, n=2, extra_body={"return_token_ids": True}
        )
        assert [choice.token_ids for choice in answer.choices] == client.samples(made["request_id"])
        base = other.completions.create(
            model="tiny", prompt=[1, 2], max_tokens=8, seed=3, n=2, extra_body={"return_token_ids": True}
        )
        assert [choice.token_ids for choice in base.choices] != client.samples(made["request_id"])


def test_chats(running):
    url, tokenizer = running
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-test") as client:
        messages = [{"role": "user", "content": "1 + 1"}]
        answers = [
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, seed=seed)
            for seed in (1, 1, 2)
        ]
        texts = [answer.choices[0].message.content for answer in answers]
        assert texts[0] == texts[1] != texts[2]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert answers[0].usage.prompt_tokens == len(rendered)


def test_errors_are_in_openai_s_form(running):
    url, _ = running
    for key, model, kind, text in (
        ("tml-test", "other", openai.BadRequestError, "There is no base model 'other'"),
        ("tml-test", "tinker://x/sampler_weights/y", openai.BadRequestError, "There is no checkpoint"),
        ("sk-x", "tiny", openai.AuthenticationError, "API key"),
    ):
        with (
            openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=key, max_retries=0) as client,
            pytest.raises(kind, match=text),
        ):
            client.completions.create(model=model, prompt=[1], max_tokens=1)
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-test", max_retries=0) as client:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        with pytest.raises(openai.BadRequestError, match="Tools"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[tool])
