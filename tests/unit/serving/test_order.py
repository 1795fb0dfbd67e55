"""Commands of a model run in the order of their numbers, once, however they arrive."""

import time

import numpy as np
from fake_models import FakeModels
from running import Raw, config_in, pass_message, service

from nemo_rl.utils.errors import WorkerDiedError

ROWS = [[1, 2, 3, 4], [5, 6, 7]]


def kinds(models, *wanted):
    return [what for what, _ in models.calls if what in wanted]


def test_later_requests_wait_for_earlier_ones(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path, poll_hold_s=0.3)) as url:
        client = Raw(url)
        model = client.model(client.session())
        third = client.submit_pass(model, 3, ROWS)["request_id"]
        second = client.ok("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})["request_id"]
        waiting = client.post("retrieve_future", request_id=third)
        assert waiting.status_code == 408
        assert waiting.json()["type"] == "try_again"
        assert "the request 1 of the model has not arrived" in waiting.json()["queue_state_reason"]
        assert kinds(models, "backward", "update") == []
        first = client.submit_pass(model, 1, ROWS)["request_id"]
        losses = [client.output(each)[1]["loss:sum"] for each in (first, third)]
        client.result(second)
        assert kinds(models, "backward", "update") == ["backward", "update", "backward"]
        assert losses[1] < losses[0]


def test_a_poll_is_held_until_the_result_is_there(tmp_path):
    models = FakeModels(delay_s=0.4)
    with service(models, config_in(tmp_path)) as url:
        client = Raw(url)
        model = client.model(client.session())
        started = time.monotonic()
        request = client.submit_pass(model, 1, ROWS)["request_id"]
        answer = client.post("retrieve_future", request_id=request)
        assert answer.status_code == 200
        assert 0.3 < time.monotonic() - started < 5
        assert client.post("retrieve_future", request_id=request).content == answer.content


def test_the_same_request_has_one_promise_and_another_body_is_an_error(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path)) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        first, again = (client.submit_pass(model, 1, ROWS) for _ in range(2))
        assert first == again
        other = client.submit_pass(model, 1, [[1, 2]])
        assert "sent before with another body" in client.error(other["request_id"])
        client.output(first["request_id"])
        assert client.submit_pass(model, 1, ROWS) == first
        assert kinds(models, "backward") == ["backward"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
        assert client.result(client.ok("create_model", **body)["request_id"])["model_id"] == model
        changed = {**body, "lora_config": {"rank": 4, "seed": 2}}
        assert "another body" in client.error(client.ok("create_model", **changed)["request_id"])
        assert kinds(models, "create") == ["create"]


def test_maps_of_another_order_are_the_same_request(tmp_path):
    with service(FakeModels(), config_in(tmp_path)) as url:
        client = Raw(url)
        model = client.model(client.session())
        first = client.submit_pass(model, 1, ROWS)
        message = pass_message(model, 1, ROWS)
        turned = message.__class__(model_id=model, seq_id=1, loss_fn="cross_entropy")
        for datum in message.data:
            new = turned.data.add()
            new.model_input.extend(datum.model_input)
            for name in sorted(datum.loss_fn_inputs, reverse=True):
                new.loss_fn_inputs[name].CopyFrom(datum.loss_fn_inputs[name])
        assert client.http.post("/api/v1/forward_backward", content=turned.SerializeToString()).json() == first


def test_gradients_of_several_requests_add_up(tmp_path):
    with service(FakeModels(), config_in(tmp_path)) as url:
        client = Raw(url)
        session = client.session()
        apart, joined, repeated = (client.model(session, number) for number in range(3))
        for model, parts in ((apart, [[ROWS[0]], [ROWS[1]], [ROWS[0]]]), (repeated, [[ROWS[0]], [ROWS[1]], [ROWS[0]]])):
            for seq_id, rows in enumerate(parts, start=1):
                client.submit_pass(model, seq_id, rows)
        client.submit_pass(joined, 1, [*ROWS, ROWS[0]])
        for model, seq_id in ((apart, 4), (repeated, 4), (joined, 2)):
            client.result(
                client.ok("optim_step", model_id=model, seq_id=seq_id, adam_params={"learning_rate": 0.1})["request_id"]
            )
        found = [
            np.concatenate(client.output(client.submit_pass(model, seq_id, ROWS, forward_only=True)["request_id"])[0])
            for model, seq_id in ((apart, 5), (repeated, 5), (joined, 3))
        ]
        assert (found[0] == found[1]).all()
        np.testing.assert_allclose(found[0], found[2], atol=1e-6)


def test_users_have_turns(tmp_path):
    """Steps of two users alternate, although the first one has sent all of them before."""
    models = FakeModels()
    with service(models, config_in(tmp_path)) as url:
        clients = [Raw(url, f"tml-{name}") for name in ("one", "two")]
        ids = [client.model(client.session()) for client in clients]
        models.delay_s = 2.0  # until all requests have arrived
        for client, model in zip(clients, ids, strict=True):
            for step in range(6):
                client.submit_pass(model, 2 * step + 1, ROWS)
                client.ok("optim_step", model_id=model, seq_id=2 * step + 2)
        models.delay_s = 0.0
        for client, model in zip(clients, ids, strict=True):
            client.result(f"{model}:12")
        order = [name.split("@")[0] for what, name in models.calls if what == "update"]
        assert order == ids * 6


def test_errors_of_the_server_are_tried_again_from_the_stored_state(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path)) as url:
        client = Raw(url)
        session = client.session()
        model, other = client.model(session), client.model(session, 1)
        losses = []
        for each in (model, other):
            client.output(client.submit_pass(each, 1, ROWS)["request_id"])
            client.result(client.ok("optim_step", model_id=each, seq_id=2)["request_id"])
            client.output(client.submit_pass(each, 3, ROWS)["request_id"])
            models.fail_next = 1 if each == model else 0
            client.result(client.ok("optim_step", model_id=each, seq_id=4)["request_id"])
            losses.append(client.output(client.submit_pass(each, 5, ROWS)["request_id"])[1])
        assert losses[0] == losses[1]
        models.fail_next = 10
        failed = client.retrieve(client.submit_pass(model, 6, ROWS)["request_id"]).json()
        assert failed["category"] == "server"
        models.fail_next = 0
        client.output(client.submit_pass(model, 7, ROWS)["request_id"])


def test_a_lost_process_ends_the_service_and_keeps_the_request(tmp_path):
    lost = []
    models = FakeModels()
    models.on_call = lambda what: (_ for _ in ()).throw(WorkerDiedError("rank 0")) if what == "update" else None
    with service(models, config_in(tmp_path, poll_hold_s=0.3), on_loss=lost.append) as url:
        client = Raw(url)
        model = client.model(client.session())
        client.submit_pass(model, 1, ROWS)
        request = client.ok("optim_step", model_id=model, seq_id=2)["request_id"]
        assert client.post("retrieve_future", request_id=request).status_code == 408
        assert lost
    with service(FakeModels(), config_in(tmp_path)) as url:
        assert Raw(url).result(request)["metrics"]["grad_norm"] > 0
