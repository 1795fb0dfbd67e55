"""Eight tenants of real models through the service, more than fit into memory: each gets its bits from being alone.

pytest tests/unit/serving/test_eight_tenants.py -m long
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Raw, config_in, service
from test_models import CLUSTER, PROMPT, policy

from nemo_rl.serving.models import ServedModels, open_models
from nemo_rl.serving.wire.messages import SampleResponse

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

NUM_TENANTS = 8
STEPS = 6


@pytest.fixture(scope="module")
def crowded(local_ray: None) -> Iterator[ServedModels]:
    opened = open_models(policy(), CLUSTER, seed=0, name="crowded")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def quiet(local_ray: None) -> Iterator[ServedModels]:
    opened = open_models(policy(), CLUSTER, seed=0, name="quiet")
    yield opened
    opened.close()


def drawn(client: Raw, sampler: str, seq_id: int, seed: int) -> list[bytes]:
    """Tokens and log-probabilities of two responses."""
    made = client.ok(
        "asample",
        sampling_session_id=sampler,
        seq_id=seq_id,
        num_samples=2,
        prompt={"chunks": [{"tokens": [*PROMPT, seed]}]},
        sampling_params={"max_tokens": 10, "stop": [], "seed": seed},
    )
    message = SampleResponse()
    message.ParseFromString(client.result(made["request_id"]))
    return [part for each in message.sequences for part in (each.tokens, each.logprobs)]


def of_tenant(url: str, number: int, states: Path) -> list[Any]:
    """Everything that a tenant sees, and the files of its last checkpoint."""
    client = Raw(url, key=f"tml-{number}")
    session = client.session()
    lora = {"rank": 1 + 3 * number, "seed": number, "train_unembed": number % 3 != 1, "train_mlp": number % 4 != 2}
    made = client.ok("create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=lora)
    model = client.result(made["request_id"])["model_id"]
    seen: list[Any] = []
    seq_id = 0
    for step in range(STEPS):
        draws = np.random.default_rng([number, step])
        for length in (5 + number, 17 - number):
            seq_id += 1
            rows = draws.integers(0, 250, (2, length)).tolist()
            logprobs, metrics = client.output(client.submit_pass(model, seq_id, rows)["request_id"])
            seen += [metrics["loss:sum"], *(each.tobytes() for each in logprobs)]
        seq_id += 1
        rate = {"learning_rate": 0.01 * (1 + number), "grad_clip_norm": float(step % 2)}
        seen.append(
            client.result(client.ok("optim_step", model_id=model, seq_id=seq_id, adam_params=rate)["request_id"])
        )
        if step % 3 == 1:
            seq_id += 1
            body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": step}
            client.result(client.ok("save_weights_for_sampler", **body)["request_id"])
            seen += drawn(client, f"{session}:sample:{step}", 1, number + step)
    seq_id += 1
    client.result(client.ok("save_weights", model_id=model, seq_id=seq_id, path="end")["request_id"])
    files = sorted((states / "checkpoints" / model.replace(":", "-") / "weights/end").rglob("*.safetensors"))
    assert len(files) >= 2, "weights and the state of the optimizer"
    return [*seen, *((file.name, file.read_bytes()) for file in files)]


def of_base(url: str) -> list[Any]:
    """Samples of the base model, for as long as the tenants need."""
    client = Raw(url, key="tml-base")
    session = client.session()
    client.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny")
    return [drawn(client, f"{session}:sample:0", 1 + seed, seed) for seed in range(12)]


def test_eight_tenants_and_the_base_get_the_bits_that_each_gets_alone(crowded, quiet, tmp_path):
    config = config_in(tmp_path / "together", max_resident_models=3, state_every=4)
    with service(crowded, config) as url, ThreadPoolExecutor(NUM_TENANTS + 1) as threads:
        base = threads.submit(of_base, url)
        tenants = [threads.submit(of_tenant, url, n, tmp_path / "together") for n in range(NUM_TENANTS)]
        together = [each.result(600) for each in [*tenants, base]]
    with service(quiet, config_in(tmp_path / "alone", max_resident_models=16)) as url:
        for number in range(NUM_TENANTS):
            assert together[number] == of_tenant(url, number, tmp_path / "alone"), number
        assert together[-1] == of_base(url)
    assert len({str(seen) for seen in together}) == NUM_TENANTS + 1
