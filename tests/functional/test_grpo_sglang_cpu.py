"""GRPO whose answers come from a server that speaks SGLang's interface."""

import sys

import pytest
from example_runs import REPOSITORY, StartExample, read_metrics

sys.path.append(str(REPOSITORY / "tests/unit/models/generation"))

from sglang_stand_in import Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.long
def test_a_run_learns_from_the_samples_of_a_server(start_example: StartExample) -> None:
    router = "policy.generation.sglang_cfg.sglang_router_config"
    with Running(str(REPOSITORY / "examples/assets/tiny-chat"), "--max-model-len", "128") as server:
        server.wait()
        overrides = (
            "policy.generation.backend=sglang",
            f"{router}={{use_external_router: true, sglang_router_ip: 127.0.0.1, sglang_router_port: {server.port}}}",
            "policy.generation.colocated.enabled=false",
            "policy.generation.colocated.resources.ranks_per_node=1",
            *("grpo.max_num_steps=4", "grpo.val_period=0", "grpo.val_at_start=false", "checkpointing.enabled=false"),
        )
        run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *overrides)
        assert run.finish() == 0, run.log()[-3000:]
        updates = server.calls().count("update_weights_from_disk")
    metrics = read_metrics(run.log_dir)
    errors = [metrics["train", step, "token_mult_prob_error"] for step in range(1, 5)]
    assert max(errors) < 1.001, errors
    assert len({metrics["train", step, "loss"] for step in range(1, 5)}) == 4
    assert updates == 4
