"""One tenant of the training service, written with the official library: NAME RANK STEPS PAUSE_S OUTPUT.

It trains, saves, loads and samples, and writes a file with everything that it sees: losses, tokens, and the digests of
the exported weights and of log-probabilities after a load of the stored state. TINKER_BASE_URL is the address.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tinker
from tinker import types

LENGTHS = (9, 14, 6)


def datum(first: int, length: int, of_loss: dict[str, list[float]]) -> types.Datum:
    tokens = [(first + 7 * place) % 250 for place in range(length + 1)]
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[length])
    columns = {
        name: types.TensorData(data=values[:length], dtype="float32", shape=[length])
        for name, values in of_loss.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets, **columns}
    )


def batch(name: str, step: int) -> tuple[list[types.Datum], types.LossFnType]:
    """The rows of a step, and the name of its loss."""
    loss: types.LossFnType = "importance_sampling" if step % 3 == 2 else "cross_entropy"
    if loss == "cross_entropy":
        inputs = {"weights": [1.0] * 20}
    else:
        inputs = {"logprobs": [-3.0] * 20, "advantages": [1.0, -0.5] * 10}
    first = ord(name[0]) + 31 * step
    return [datum(first + 11 * row, length, inputs) for row, length in enumerate(LENGTHS)], loss


def sampled(sampler: Any, step: int) -> list[Any]:
    prompt = types.ModelInput.from_ints([(step + 3 * place) % 250 for place in range(5)])
    answer = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=10, seed=step, stop=[])).result()
    return [[sequence.tokens, sequence.logprobs] for sequence in answer.sequences]


def work(name: str, rank: int, steps: int, pause_s: float) -> list[Any]:
    """Return everything that the tenant sees."""
    service = tinker.ServiceClient(api_key=f"tml-{name}")
    trainer = service.create_lora_training_client(base_model="tiny-chat", rank=rank, seed=rank).result()
    seen: list[Any] = []
    for step in range(steps):
        data, loss = batch(name, step)
        passes = [trainer.forward_backward(data[:2], loss), trainer.forward_backward(data[2:], loss)]
        update = trainer.optim_step(types.AdamParams(learning_rate=5e-3, weight_decay=0.1, grad_clip_norm=1.0))
        seen += [each.result().metrics["loss:sum"] for each in passes]
        seen.append(update.result().metrics)
        if step % 4 == 1:
            seen.append(sampled(trainer.save_weights_and_get_sampling_client().result(), step))
        if step % 5 == 2:
            path = trainer.save_state(f"step-{step}").result().path
            if step % 2 == 0:
                trainer = service.create_training_client_from_state_with_optimizer(path).result()
        time.sleep(pause_s)
    path = trainer.save_state("end").result().path
    data, _ = batch(name, 0)
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    seen.append([output["logprobs"].tolist() for output in outputs])
    seen.append(["end", path.rpartition("/")[2], trainer.model_id.rpartition(":")[2]])
    print(f"MODEL {trainer.model_id}", flush=True)
    return seen


if __name__ == "__main__":
    os.environ["TINKER_TELEMETRY"] = "0"
    found = work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    Path(sys.argv[5]).write_text(json.dumps(found))
