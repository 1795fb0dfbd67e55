"""Sample with an engine and score with a policy's model, and print how many log-probabilities differ.

The process prints a JSON object for each model type of the command line: number of tokens by number format and layout,
and how many of them have other bits in the policy's model. All prompts are answered twice, with the weights of the
files and after a sync of other weights. `--plain` leaves matrix products as they are, and `--engine vllm` samples with
vLLM, in a process of its own, because vLLM changes classes of transformers. With `--trainer-ranks` and `--into FOLDER`,
the engine computes the sums of so many tensor-parallel ranks, and models and samples are only written there.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from parity.every_type import save_tiny_model
from parity.models import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.distributed.parallel_logprobs import SamplingDensity
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.attention import set_attention
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.dtensor.heads import CausalLMWithLogprobs, build_causal_lm
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, SamplingParams
from nemo_rl.models.generation.registry import engine_kind, make_engine
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.huggingface.load import hold_in_float32, load_causal_lm
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.models.training.shared_prefixes import share_prefixes

TEMPERATURE = 0.8
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
"""Fields of configurations of mixtures of experts."""
type Samples = tuple[list[list[int]], list[list[int]], list[Tensor]]
"""Prompts, answers and the log-probabilities of their tokens."""
type Layout = Callable[[CausalLMWithLogprobs, list[Tensor]], list[Tensor]]


def main() -> None:
    """Compare engine and policy for each model type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="+")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--trainer-ranks", type=int, default=1)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    if not given.plain:
        compute_rows_alike(given.trainer_ranks)
    os.environ.update({"RANK": "0"} | engine_kind(given.engine).environment("cpu"))
    if given.into is not None:
        write_samples(given.types, given.engine, given.into)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.engine == "vllm":
            command = [sys.executable, __file__, "--engine", "vllm", "--into", folder, *given.types]
            subprocess.run(command, stdout=sys.stderr, check=True)
        else:
            write_samples(given.types, given.engine, Path(folder))
        for model_type in given.types:
            found: Any = {dtype: compare(Path(folder, model_type), dtype) for dtype in ("float32", "bfloat16")}
            print(json.dumps({model_type: found}), flush=True)


def make_model(model_type: str, engine: str, folder: Path) -> None:
    """Write a tiny model with a tokenizer. The name of the type may end with one of rotary embeddings."""
    base, _, rotation = model_type.partition(":")
    save_tiny_model(base, folder)
    save_tokenizer(folder)
    if rotation:
        rotate_by(folder, rotation)
    if engine == "vllm":
        fit_to_vllm(folder)


def write_samples(types: list[str], engine: str, into: Path) -> None:
    """Write the model of each type, and its samples in both number formats.

    Models with experts come first, because vLLM makes its expert groups with the first engine of a process.
    """
    for model_type in types:
        make_model(model_type, engine, into / model_type)
    folders = sorted((into / name for name in types), key=lambda folder: not has_experts(folder))
    runs = [(folder, dtype) for folder in folders for dtype in ("float32", "bfloat16")]
    sent = [other_weights(str(folder), dtype) for folder, dtype in runs]  # before vLLM changes classes of transformers
    for (folder, dtype), tensors in zip(runs, sent, strict=True):
        try:
            found: Any = sample(str(folder), dtype, engine, tensors)
        except Exception as error:
            found = repr(error)[:600]
        torch.save(found, f"{folder}-{dtype}.pt")


def has_experts(folder: Path) -> bool:
    """Return whether a model is a mixture of experts."""
    return not EXPERTS.isdisjoint(read_config(folder))


def rotate_by(folder: Path, rotation: str) -> None:
    """Give a model rotary embeddings of another type, whose scales begin to act within the compared rows."""
    scales = (
        {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} if rotation == "llama3" else {"factor": 4.0}
    )
    original = {} if rotation == "linear" else {"original_max_position_embeddings": 64}
    rope = {"rope_type": rotation, "rope_theta": 10_000.0} | scales | original
    write_config(folder, {"rope_parameters": rope, "max_position_embeddings": 512})


def fit_to_vllm(folder: Path) -> None:
    """Remove what vLLM's classes do not have: windows of some layers only, and output heads of models without one."""
    config = read_config(folder)
    if config["model_type"] in ("gemma2", "cohere2"):  # vLLM has no output head of their own
        weights = folder / "model.safetensors"
        kept = {name: value for name, value in load_file(weights).items() if name != "lm_head.weight"}
        save_file(kept, weights, metadata={"format": "pt"})
        write_config(folder, {"tie_word_embeddings": True})
    if config.get("use_sliding_window"):
        layers = ["full_attention"] * config["num_hidden_layers"]
        write_config(folder, {"use_sliding_window": False, "layer_types": layers})


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write_config(folder: Path, changes: dict[str, Any]) -> None:
    """Change fields of the configuration of a model."""
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w2", pad_token="w0").save_pretrained(folder)


def compare(folder: Path, dtype: str) -> dict[str, tuple[int, int]] | str:
    """Return the number of sampled tokens and of those whose log-probability has other bits, by layout."""
    result = dict.fromkeys(LAYOUTS, (0, 0))
    samples = torch.load(f"{folder}-{dtype}.pt")
    if isinstance(samples, str):
        return samples
    for hf, (prompts, answers, logprobs) in zip(models(str(folder), dtype), samples, strict=True):
        set_attention(hf, register_varlen_attention())
        model = build_causal_lm(hf.eval())
        rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        for name, layout in LAYOUTS.items():
            with torch.no_grad():
                scores = layout(model, rows)
            ours = torch.cat([score[-len(answer) :] for score, answer in zip(scores, answers, strict=True)])
            tokens, others = result[name]
            result[name] = (tokens + len(ours), others + int((ours != torch.cat(logprobs)).sum()))
    return result


def models(folder: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model of a folder, and one with other weights."""
    first = load_causal_lm(folder)
    for parameter in first.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    hold_in_float32(first, getattr(torch, dtype))
    second = deepcopy(first)
    for parameter in second.parameters():
        parameter.data = parameter.data.roll(1, -1)
    return first, second


def other_weights(folder: str, dtype: str) -> list[tuple[str, Tensor]]:
    """Return what a sync sends of the second of the `models`."""
    model = models(folder, dtype)[1]
    return list(in_checkpoint(model, weights_by_name(model).items()))


def sample(folder: str, dtype: str, backend: str, other: list[tuple[str, Tensor]]) -> list[Samples]:
    """Return samples with the weights of the files, and after a sync of other weights."""
    settings = EngineSettings(
        *(backend, folder, folder, "cpu", dtype, 120), kv_cache_bytes=8 << 20, load_weights=True, zero_mismatch=True
    )
    engine: Any = make_engine(settings)
    before = answered(engine)
    engine.start_loading()
    asyncio.run(engine.load_tensors(other))
    unbound = engine.finish_loading(changed=True)
    assert not unbound, unbound
    return [before, answered(engine)]


def answered(engine: Any) -> Samples:
    """Return prompts, answers and their log-probabilities. Requests come one by one, and share prompts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 17, 70, 33)]
    prompts = [*prompts, *prompts[1:], prompts[2][:65] + [5, 6]]
    done: dict[str, Any] = {}
    waiting = list(range(len(prompts)))
    while len(done) < len(prompts):
        if waiting and rng.random() < 0.5:
            number = waiting.pop(0)
            sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=rng.randrange(5, 45))
            engine.add_request(str(number), GenerationRequest(prompts[number], sampling, seed=number))
        elif len(waiting) < len(prompts) - len(done):
            done |= {each.request_id: each for each in engine.step()}
    ordered = [done[str(number)] for number in range(len(prompts))]
    return prompts, [each.token_ids for each in ordered], [torch.tensor(each.logprobs) for each in ordered]


def scored(
    model: CausalLMWithLogprobs, inputs: dict[str, Any], places: list[Tensor], rows: list[Tensor]
) -> list[Tensor]:
    """Return the log-probabilities of the tokens of rows after their first, whose tokens are at `places`."""
    targets, positions = torch.cat([row[1:] for row in rows]), torch.cat([each[:-1] for each in places])
    logprobs, _ = model(inputs, positions, targets, SamplingDensity(TEMPERATURE))
    return list(logprobs.split([len(row) - 1 for row in rows]))


def alone(model: CausalLMWithLogprobs, rows: list[Tensor]) -> list[Tensor]:
    """Score each row in a pass of its own."""
    return [scored(model, {"input_ids": row[None]}, [torch.arange(len(row))], [row])[0] for row in rows]


def padded(model: CausalLMWithLogprobs, rows: list[Tensor]) -> list[Tensor]:
    """Score all rows in one padded batch."""
    ids = pad_sequence(rows, batch_first=True)
    places = [number * ids.shape[1] + torch.arange(len(row)) for number, row in enumerate(rows)]
    return scored(model, {"input_ids": ids}, places, rows)


def packed(model: CausalLMWithLogprobs, rows: list[Tensor]) -> list[Tensor]:
    """Score all rows in one packed row."""
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    places = [end + torch.arange(len(row)) for end, row in zip(ends, rows, strict=False)]
    return scored(model, packed_model_inputs(rows), places, rows)


def shared(model: CausalLMWithLogprobs, rows: list[Tensor]) -> list[Tensor]:
    """Score all rows in one packed row, in which rows share the tokens that they begin with."""
    order = sorted(range(len(rows)), key=lambda number: rows[number].tolist())
    rows = [rows[number] for number in order]
    alike = [0] + [
        next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        for left, right in zip(rows, rows[1:], strict=False)
    ]
    lengths = [len(row) for row in rows]
    numbers = list(range(len(rows)))
    layout = share_prefixes(pad_sequence(rows, batch_first=True), lengths, Prefixes(numbers, alike), round_to=1)
    row_of_token = torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))
    places = layout.places(row_of_token, torch.cat([torch.arange(length) for length in lengths]))
    scores = scored(model, layout.model_inputs, list(places.split(lengths)), rows)
    return [score for _, score in sorted(zip(order, scores, strict=True), key=lambda pair: pair[0])]


LAYOUTS: dict[str, Layout] = {"alone": alone, "padded": padded, "packed": packed, "shared": shared}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
