"""Sample with an engine and score with a policy's model in one process, and print how many log-probabilities differ.

The process prints a JSON object for each model type of the command line: number of tokens by number format and layout,
and how many of them have other bits in the policy's model. `--plain` leaves matrix products as they are, and
`--engine vllm` samples with vLLM. With `--trainer-ranks` and `--into FOLDER`, the engine computes the sums of so many
tensor-parallel ranks, and models and samples are only written there.
"""

import argparse
import json
import logging
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parity.every_type import save_tiny_model
from parity.models import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.distributed.parallel_logprobs import SamplingDensity
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.attention import set_attention
from nemo_rl.models.dtensor.heads import CausalLMWithLogprobs, build_causal_lm
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, SamplingParams
from nemo_rl.models.generation.registry import engine_kind, make_engine
from nemo_rl.models.huggingface.load import hold_in_float32, load_causal_lm
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.models.training.shared_prefixes import share_prefixes

TEMPERATURE = 0.8
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
    for model_type in given.types:
        with tempfile.TemporaryDirectory() as folder:
            try:
                make_model(model_type, given.engine, Path(folder))
                found: Any = {dtype: compare(folder, dtype, given.engine) for dtype in ("float32", "bfloat16")}
            except Exception as error:
                found = repr(error)[:300]
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
    """Write the model of each type, and prompts, answers and their log-probabilities in both number formats."""
    for model_type in types:
        make_model(model_type, engine, into / model_type)
        for dtype in ("float32", "bfloat16"):
            torch.save(sample(str(into / model_type), dtype, engine), into / f"{model_type}-{dtype}.pt")


def rotate_by(folder: Path, rotation: str) -> None:
    """Give a model rotary embeddings of another type, whose scales begin to act within the compared rows."""
    path = folder / "config.json"
    scales = (
        {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} if rotation == "llama3" else {"factor": 4.0}
    )
    original = {} if rotation == "linear" else {"original_max_position_embeddings": 64}
    rope = {"rope_type": rotation, "rope_theta": 10_000.0} | scales | original
    changed = {"rope_parameters": rope, "max_position_embeddings": 512}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def fit_to_vllm(folder: Path) -> None:
    """Remove what vLLM's classes do not have: windows of some layers only, and output heads of models without one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] in ("gemma2", "cohere2"):  # vLLM has no output head of their own
        weights = folder / "model.safetensors"
        kept = {name: value for name, value in load_file(weights).items() if name != "lm_head.weight"}
        save_file(kept, weights, metadata={"format": "pt"})
        config |= {"tie_word_embeddings": True}
        path.write_text(json.dumps(config))
    if config.get("use_sliding_window"):
        layers = ["full_attention"] * config["num_hidden_layers"]
        path.write_text(json.dumps(config | {"use_sliding_window": False, "layer_types": layers}))


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w2", pad_token="w0").save_pretrained(folder)


def compare(folder: str, dtype: str, backend: str) -> dict[str, tuple[int, int]]:
    """Return the number of sampled tokens and of those whose log-probability has other bits, by layout."""
    hf = load_causal_lm(folder)  # before vLLM, which changes classes of transformers that it serves itself
    prompts, answers, logprobs = sample(folder, dtype, backend)
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    hold_in_float32(hf, getattr(torch, dtype))
    set_attention(hf, register_varlen_attention())
    model = build_causal_lm(hf.eval())
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    result = {}
    for name, layout in LAYOUTS.items():
        with torch.no_grad():
            scores = layout(model, rows)
        ours = torch.cat([score[-len(answer) :] for score, answer in zip(scores, answers, strict=True)])
        result[name] = (len(ours), int((ours != torch.cat(logprobs)).sum()))
    return result


def sample(folder: str, dtype: str, backend: str) -> tuple[list[list[int]], list[list[int]], list[Tensor]]:
    """Return prompts, answers and their log-probabilities. Requests come one by one, and share prompts."""
    settings = EngineSettings(
        *(backend, folder, folder, "cpu", dtype, 120), kv_cache_bytes=8 << 20, load_weights=True, zero_mismatch=True
    )
    engine: Any = make_engine(settings)
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
