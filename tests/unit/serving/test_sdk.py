"""The official library of the Tinker API drives the service."""

import json
import logging
import math
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_models import FakeModels, log_softmax
from running import Raw, config_in, service

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

ROWS = [[1, 2, 3, 4], [5, 6, 7]]
PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    models = FakeModels()
    with service(models, config_in(tmp_path_factory.mktemp("sdk") / "state", max_models_per_key=100)) as url:
        yield url, models


def client_of(url: str, key: str = "tml-x", **more):
    return tinker.ServiceClient(base_url=url, api_key=key, **more)


def datum(row, weights=None):
    inputs = {
        "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
        "weights": types.TensorData(data=weights or [1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


DATA = [datum(row) for row in ROWS]
STEP = types.AdamParams(learning_rate=0.1)


def steps(client, number=1):
    """Train some steps and return the losses."""
    passes = []
    for _ in range(number):
        passes.append(client.forward_backward(DATA, "cross_entropy"))
        client.optim_step(STEP)
    return [each.result().metrics["loss:sum"] for each in passes]


def logprobs(client):
    return [output["logprobs"].tolist() for output in client.forward(DATA, "cross_entropy").result().loss_fn_outputs]


def test_two_clients_of_one_seed_are_equal_until_they_train(running):
    session = client_of(running[0])
    first, second, other = (
        session.create_lora_training_client(base_model="tiny", rank=8, seed=seed).result() for seed in (1, 1, 2)
    )
    ids = [each.model_id for each in (first, second, other)]
    assert [each.rpartition(":train:")[2] for each in ids] == ["0", "1", "2"]
    assert len({each.split(":")[0] for each in ids}) == 1
    assert logprobs(first) == logprobs(second) == logprobs(other)
    for each in (first, second, other):
        steps(each)
    assert logprobs(first) == logprobs(second) != logprobs(other)


def test_a_new_adapter_is_the_base_model_and_losses_are_sums(running):
    url, models = running
    client = client_of(url).create_lora_training_client(base_model="Qwen/Tiny", rank=4).result()
    table = log_softmax(models.base)
    expected = [[table[before, after] for before, after in zip(row, row[1:], strict=False)] for row in ROWS]
    for found, wanted in zip(logprobs(client), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    data = [datum(row, [2.0, -1.0, 0.5][: len(row) - 1]) for row in ROWS]
    step = client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)
    assert step[1].result().metrics["grad_norm"] > 0
    weighted = [w * x for xs in expected for w, x in zip([2.0, -1.0, 0.5], xs, strict=False)]
    assert step[0].result().metrics["loss:sum"] == pytest.approx(-sum(weighted))
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("Qwen/Tiny", 4, True)
    assert info.model_data.tokenizer_id == "Qwen/Tiny"


def test_training_lowers_the_loss(running):
    losses = steps(client_of(running[0]).create_lora_training_client(base_model="tiny", rank=8).result(), 8)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_many_datums_are_one_gradient_in_order(running):
    url, models = running
    client = client_of(url).create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    config = client.holder._client_config
    client.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 100})
    data = [datum([index % 30, (index * 7) % 30, 3]) for index in range(250)]
    before = len(models.calls)
    result = client.forward_backward(data, "cross_entropy").result()
    assert [what for what, _ in models.calls[before:]] == ["backward"] * 3
    table = log_softmax(models.base)
    for index, output in enumerate(result.loss_fn_outputs):
        assert output["logprobs"].tolist()[0] == pytest.approx(table[index % 30, (index * 7) % 30], abs=1e-5)
    assert len(result.loss_fn_outputs) == 250


def test_custom_losses_run_in_the_program(running):
    torch = pytest.importorskip("torch")
    url, models = running
    client = client_of(url).create_lora_training_client(base_model="tiny", rank=4, seed=5).result()
    plain = client_of(url).create_lora_training_client(base_model="tiny", rank=4, seed=5).result()
    start = logprobs(client)

    def squares(data, found):
        loss = sum((each**2).sum() for each in found)
        return loss, {"squares:sum": float(loss)}

    result = client.forward_backward_custom(DATA, squares).result()
    assert result.metrics["squares:sum"] == pytest.approx(sum(x * x for row in start for x in row), rel=1e-5)
    assert "surrogate_loss:sum" in result.metrics
    # The gradient of the squares is that of a cross-entropy with weights -2x.
    weights = [[-2 * x for x in row] for row in start]
    plain.forward_backward(
        [datum(row, each) for row, each in zip(ROWS, weights, strict=True)], "cross_entropy"
    ).result()
    client.optim_step(STEP).result()
    plain.optim_step(STEP).result()
    for found, wanted in zip(logprobs(client), logprobs(plain), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert torch is not None


def test_several_targets_for_a_position(running):
    client = client_of(running[0]).create_lora_training_client(base_model="tiny", rank=4).result()
    targets = np.array([[2, 3], [3, 4]])
    weights = np.array([[0.75, 0.25], [1.0, 0.0]], np.float32)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)}
    both = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    result = client.forward_backward([both], "cross_entropy").result()
    found = result.loss_fn_outputs[0]["logprobs"]
    assert found.shape == [2, 2]
    assert result.metrics["loss:sum"] == pytest.approx(-(weights * found.to_numpy()).sum(), rel=1e-5)


def test_states_have_names(running):
    session = client_of(running[0])
    client = session.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    steps(client, 2)
    path = client.save_state("first", ttl_seconds=3600).result().path
    assert path == f"tinker://{client.model_id}/weights/first"
    started = time.monotonic()
    with pytest.raises(Exception, match="exists already"):
        client.save_state("first").result()
    assert time.monotonic() - started < 5
    steps(client)
    client.save_state("first", overwrite=True).result()
    rest = session.create_rest_client()
    (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (listed.tinker_path, listed.checkpoint_type, listed.checkpoint_id) == (path, "training", "weights/first")
    assert listed.size_bytes > 0
    assert listed.expires_at is None
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("tiny", 4, True)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert rest.list_user_checkpoints().result().checkpoints[0].expires_at is not None
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("tiny", 4, path)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_new_client_continues_from_a_state(running, with_optimizer):
    session = client_of(running[0])
    client = session.create_lora_training_client(
        base_model="tiny", rank=4, seed=9, user_metadata={"renderer": "x"}
    ).result()
    steps(client, 3)
    path = client.save_state("mid").result().path
    load = (
        session.create_training_client_from_state_with_optimizer
        if with_optimizer
        else session.create_training_client_from_state
    )
    copy = load(path).result()
    assert copy.model_id.endswith(":train:1")
    info = copy.get_info()
    assert (info.lora_rank, info.model_name) == (4, "tiny")
    assert session.create_rest_client().get_training_run(copy.model_id).result().user_metadata == {"renderer": "x"}
    assert logprobs(copy) == logprobs(client)
    steps(client, 3), steps(copy, 3)
    assert (logprobs(copy) == logprobs(client)) is with_optimizer


def test_snapshots_keep_their_weights(running):
    url, models = running
    client = client_of(url).create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    steps(client, 2)
    old = client.save_weights_and_get_sampling_client().result()
    before = old.sample(PROMPT, 2, params).result()
    steps(client, 8)
    new = client.save_weights_and_get_sampling_client().result()
    named = (
        client_of(url)
        .create_sampling_client(model_path=client.save_weights_for_sampler("named").result().path)
        .result()
    )
    again, after = old.sample(PROMPT, 2, params).result(), new.sample(PROMPT, 2, params).result()
    assert [each.tokens for each in again.sequences] == [each.tokens for each in before.sequences]
    assert [each.tokens for each in after.sequences] != [each.tokens for each in before.sequences]
    same = named.sample(PROMPT, 2, params).result()
    assert [each.tokens for each in same.sequences] == [each.tokens for each in after.sequences]
    assert named.get_base_model() == "tiny"


def test_samples_depend_on_their_request_only(running):
    url, _ = running
    clients = [client_of(url, f"tml-user{number}") for number in range(3)]
    samplers = [each.create_sampling_client(base_model="tiny").result() for each in clients]
    params = types.SamplingParams(max_tokens=10, seed=11, stop=[])
    alone = samplers[0].sample(PROMPT, 4, params).result()
    others = [
        samplers[number % 3].sample(types.ModelInput.from_ints([number % 30]), 1, types.SamplingParams(max_tokens=10))
        for number in range(50)
    ]
    among = samplers[0].sample(PROMPT, 4, params).result()
    tokens = [tuple(each.tokens) for each in alone.sequences]
    assert [tuple(each.tokens) for each in among.sequences] == tokens
    assert len(set(tokens)) == 4
    ids = [each.sequence_id for result in (alone, among) for each in result.sequences]
    assert len(set(ids)) == 8
    assert len({tuple(each.result().sequences[0].tokens) for each in others}) > 40


def test_stops(running):
    sampler = client_of(running[0]).create_sampling_client(base_model="tiny").result()

    def ends(stop, seeds=20):
        waiting = [
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=30, seed=seed, stop=stop))
            for seed in range(seeds)
        ]
        return [each.result().sequences[0] for each in waiting]

    for stop, last in (([7], {7}), (["h"], {7}), (None, {2}), ([5, 9], {5, 9})):
        found = ends(stop)
        stopped = [each for each in found if each.stop_reason == "stop"]
        assert stopped
        assert {each.tokens[-1] % 26 if stop == ["h"] else each.tokens[-1] for each in stopped} <= last
        assert all(len(each.tokens) == 30 for each in found if each.stop_reason == "length")
    assert [(each.stop_reason, len(each.tokens)) for each in ends([], 5)] == [("length", 30)] * 5


def test_scores_of_prompts(running):
    url, models = running
    client = client_of(url).create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    steps(client, 3)
    sampler = client.save_weights_and_get_sampling_client().result()
    row = ROWS[0]
    found = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
    assert found[0] is None
    (expected, _) = logprobs(client)
    np.testing.assert_allclose(found[1:], expected, atol=1e-6)
    targets = types.TensorData(data=[2, -1, 3, 4, 5, 6], dtype="int64", shape=[3, 2])
    result = sampler.sample(
        types.ModelInput.from_ints(row),
        1,
        types.SamplingParams(max_tokens=3, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=20,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    top = result.topk_prompt_logprobs
    assert top[0] is None or all(value == -99999.0 for _, value in top[0])
    assert len(top[1]) == 20
    assert top[1][0][1] >= top[1][1][1]
    scored = result.target_prompt_logprobs.to_numpy()
    assert scored[0, 0] == pytest.approx(expected[0], abs=1e-6)
    assert math.isnan(scored[0, 1])
    sequence = result.sequences[0]
    assert len(sequence.topk_logprobs) == 3
    last = sampler.sample(
        types.ModelInput.from_ints(row),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=1,
    ).result()
    assert last.prompt_logprobs[:3] == [None] * 3
    assert last.prompt_logprobs[3] == pytest.approx(expected[2], abs=1e-6)


def test_temperature(running):
    """At half the temperature, differences of log-probabilities are twice as large."""
    url, models = running
    sampler = client_of(url).create_sampling_client(base_model="tiny").result()
    found = {}
    for seed in range(40):
        for temperature in (1.0, 0.5):
            params = types.SamplingParams(max_tokens=1, seed=seed, temperature=temperature, stop=[])
            sequence = sampler.sample(types.ModelInput.from_ints([4]), 1, params).result().sequences[0]
            found[temperature, sequence.tokens[0]] = sequence.logprobs[0]
    both = [token for value, token in found if value == 1.0 and (0.5, token) in found]
    assert len(both) >= 2
    first, second = both[:2]
    assert found[0.5, first] - found[0.5, second] == pytest.approx(
        2 * (found[1.0, first] - found[1.0, second]), abs=1e-4
    )


def test_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("tml-a alice\ntml-b bob\n")
    with service(FakeModels(), config_in(tmp_path / "state", keys_file=str(keys))) as url:
        alice = client_of(url, "tml-a").create_lora_training_client(base_model="tiny", rank=4).result()
        path = alice.save_state("x").result().path
        with pytest.raises(Exception, match="another key"):
            client_of(url, "tml-b").create_training_client_from_state(path).result()
        with pytest.raises(Exception, match="403|another key"):
            client_of(url, "tml-b").create_rest_client().get_training_run(alice.model_id).result()
        started = time.monotonic()
        with pytest.raises(Exception, match="401|unknown"):
            client_of(url, "tml-c").create_lora_training_client(base_model="tiny", rank=4).result()
        assert time.monotonic() - started < 5


def test_errors_name_their_cause(running):
    session = client_of(running[0])
    client = session.create_lora_training_client(base_model="tiny", rank=4).result()
    for data, loss, text in (
        ([datum([1] * 70)], "cross_entropy", "at most 64"),
        ([datum([1, 2, 3], [math.nan, 1.0])], "cross_entropy", "NaN"),
        (DATA, "stable_reinforce", "not published"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=text) as caught:
            client.forward_backward(data, loss).result()
        assert caught.value.category.name == "User"
    with pytest.raises(Exception, match="There is no base model 'meta/x'"):
        session.create_lora_training_client(base_model="meta/x", rank=4).result()
    with pytest.raises(Exception, match="rank 500"):
        session.create_lora_training_client(base_model="tiny", rank=500).result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    with pytest.raises(Exception, match="an image"):
        session.create_sampling_client(base_model="tiny").result().sample(
            image, 1, types.SamplingParams(max_tokens=1)
        ).result()
    assert steps(client)[0] > 0  # the model goes on


def test_a_slow_request_is_polled_rarely(tmp_path, caplog):
    models = FakeModels(delay_s=0.0)
    with service(models, config_in(tmp_path, poll_hold_s=1.0)) as url:
        client = client_of(url).create_lora_training_client(base_model="tiny", rank=4).result()
        models.delay_s = 4.5
        with caplog.at_level(logging.DEBUG):
            polls = []
            found = client.holder
            result = client.forward_backward(DATA, "cross_entropy").result()
        assert result.metrics["loss:sum"] > 0
        assert found is not None
        polls = [each for each in caplog.records if "retrieve_future" in each.getMessage()]
        assert len(polls) < 40  # several records for each poll


def test_an_unused_model_comes_back_from_the_disk(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path, max_resident_models=1)) as url:
        session = client_of(url)
        clients = [session.create_lora_training_client(base_model="tiny", rank=4, seed=7).result() for _ in range(2)]
        clients[0].forward_backward(DATA, "cross_entropy").result()  # gradients, which no file has
        for _ in range(3):
            steps(clients[1])
            logprobs(clients[0])
        clients[0].optim_step(STEP).result()
        steps(clients[0], 2)
        assert len(models.adapters) == 1
        assert logprobs(clients[0]) == logprobs(clients[1])


def test_the_end_of_a_session(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path)) as url:
        with client_of(url) as session:
            client = session.create_lora_training_client(base_model="tiny", rank=4).result()
            path = client.save_weights_for_sampler("kept").result().path
            session_id = client.model_id.split(":")[0]
        raw = Raw(url, "tml-x")
        refused = raw.ok("optim_step", model_id=client.model_id, seq_id=2)
        assert "has ended" in raw.error(refused["request_id"])
        assert raw.post("session_heartbeat", session_id=session_id).status_code == 410
        rest = client_of(url).create_rest_client()
        sampler = client_of(url).create_sampling_client(model_path=path).result()
        assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences
        assert session_id in rest.list_sessions().result().sessions
        assert rest.get_session(session_id).result().training_run_ids == [client.model_id]
        wanted = types.SessionSearchRequest(session_id=session_id)
        (found,) = rest.search_sessions(wanted).result().sessions
        assert found.status.type == "client_finished"


def test_capabilities(running):
    names = [each.model_name for each in client_of(running[0]).get_server_capabilities().supported_models]
    assert names == ["tiny", "Qwen/Tiny"]


def test_archives(running):
    session = client_of(running[0])
    client = session.create_lora_training_client(base_model="tiny", rank=4).result()
    path = client.save_weights_external("out").result().path
    urls = session.create_rest_client().get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
        assert json.load(answer)["rank"] == 4


def test_a_storm(tmp_path):
    """Four users train and sample at the same time, and each gets what a user alone gets."""
    models = FakeModels()

    def work(url, user, seed):
        session = client_of(url, f"tml-{user}")
        client = session.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()
        found = []
        for step in range(4):
            found += steps(client)
            sampler = client.save_weights_and_get_sampling_client().result()
            waiting = [sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=5, seed=step)) for _ in range(8)]
            found += [each.tokens for wait in waiting for each in wait.result().sequences]
        return found

    config = config_in(tmp_path / "many", max_resident_models=2, max_resident_samplers=2, max_concurrent_samples=5)
    with service(models, config) as url, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda number: work(url, number, number), range(4)))
    with service(FakeModels(), config_in(tmp_path / "one")) as url:
        for number in range(4):
            assert work(url, number, number) == together[number]
    assert threading.active_count() < 100
