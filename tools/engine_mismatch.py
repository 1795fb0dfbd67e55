"""Name the first operation whose output differs between an engine and the trainer, on the CPU.

    python tools/engine_mismatch.py examples/assets/tiny-chat --engine vllm --precision bfloat16

Both read the same prompt with the same weights. For each decoder layer and each operation in it, the program prints two
numbers: the share of elements with equal bits, and the largest difference, relative to the largest element. In the
first table, engine and trainer compute on their own, so a difference grows from one operation to the next. In the
second, every operation of the engine gets the trainer's inputs (`--own`), so that a difference is its own.

Modules are matched by name. vLLM's joined projections are compared with the joined outputs of the trainer's.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from parity.ranks import on_ranks
from torch import Tensor, nn
from transformers import AttentionInterface

from nemo_rl.config import PolicyConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.attention.registered import VARLEN_ATTENTION, varlen_attention
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.registry import engine_kind, make_engine

TEXT = "The sum of 17 and 25 is 42, because 7 and 5 are 12, which leaves one to carry. " * 2
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's joined projections, and the projections of transformers that they hold."""
ROTATED, ATTENDED, ACTIVATED = "queries and keys after rotation", "attention", "activation"
OPERATIONS = (
    *("input_layernorm", "self_attn.qkv_proj", f"self_attn.{ROTATED}", f"self_attn.{ATTENDED}", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_up_proj", f"mlp.{ACTIVATED}", "mlp.down_proj", ""),
)
"""Operations of a decoder layer in the order in which it computes them. The last one is the layer itself."""


@dataclass
class Recorded:
    """Tensors of one pass by the names of modules, without a batch axis."""

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def find(self, layer: str, operation: str) -> Tensor | None:
        """Return the output of an operation of a layer, or None if the layer has no such operation."""
        name = f"{layer}.{operation}" if operation else layer
        holder, _, last = name.rpartition(".")
        if last == ROTATED:
            parts = self.outputs.get(f"{holder}.rotary_emb") or self.inputs.get(f"{holder}.attn", [])[:2]
        elif last == ATTENDED:
            parts = self.outputs.get(f"{holder}.attn") or self.inputs.get(f"{holder}.o_proj", [])
        elif last == ACTIVATED:
            is_joined = f"{holder}.gate_up_proj" in self.outputs
            parts = self.outputs[f"{holder}.act_fn"] if is_joined else self.inputs.get(f"{holder}.down_proj", [])
        else:
            parts = self.outputs.get(name, [])[:1]
            parts = parts or [
                each for part in JOINED.get(last, ()) for each in self.outputs.get(f"{holder}.{part}", [])
            ]
        return torch.cat(parts, -1) if parts else None


def flat(tensor: Tensor) -> Tensor:
    """Return `[T, D]` float32 for `[1, T, D]` or `[T, D]`."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).float().clone()


def tensors_in(values: Any) -> list[Tensor]:
    """Return the floating-point tensors in the arguments or the output of a module."""
    values = values if isinstance(values, tuple | list) else [values]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def modules_by_call(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], str]]]:
    """Yield each module, and a function that returns its name for the next call. Layers may share a module."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, own in names.items():
        yield module, partial(next, cycle(own))


@contextmanager
def recording(model: nn.Module, into: Recorded) -> Iterator[None]:
    """Record the inputs and the first output of every module. A layer's output is its sum with the residual."""

    def record(name: str, args: Any, output: Any) -> None:
        found = tensors_in(output)
        if found:
            is_layer = name.rpartition(".")[2].isdigit()
            into.outputs.setdefault(name, [flat(sum(found))] if is_layer else [flat(each) for each in found])
            into.inputs.setdefault(name, [flat(each) for each in tensors_in(args)])

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: record(name(), args, output))
        for module, name in modules_by_call(model)
    ]
    names = {id(module): name for name, module in model.named_modules()}

    def attended(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = [each.transpose(1, 2).flatten(2) for each in (query, key, value)]
        into.inputs.setdefault(f"{names[id(module)]}.attn", [flat(each) for each in rows])
        return varlen_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(VARLEN_ATTENTION, attended)
    try:
        yield
    finally:
        AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
        for hook in hooks:
            hook.remove()


@contextmanager
def given_inputs(model: nn.Module, of_trainer: Recorded) -> Iterator[None]:
    """Replace the inputs of the engine's operations by those of the trainer."""

    def replace(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        wanted = of_trainer.inputs.get(name, [])
        holder, _, last = name.rpartition(".")
        if not last.endswith(("_proj", "norm", "attn", "act_fn", "rotary_emb")) or last in ("self_attn", "mlp"):
            return None
        if last in JOINED:
            wanted = of_trainer.inputs.get(f"{holder}.{JOINED[last][0]}", [])
        elif last == "act_fn":
            joined = of_trainer.find(holder.rpartition(".")[0], "mlp.gate_up_proj")
            wanted = [] if joined is None else [joined]
        elif last == "rotary_emb":
            parts = (of_trainer.outputs.get(f"{holder}.{each}", []) for each in ("q_proj", "k_proj"))
            wanted = [each for part in parts for each in part]
        own = tensors_in(args)
        if not wanted or any(each.numel() != mine.numel() for each, mine in zip(wanted, own, strict=False)):
            return None
        values = iter([*wanted, *([None] * len(own))])
        return tuple(_like(next(values), each) if any(each is mine for mine in own) else each for each in args)

    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: replace(name(), args))
        for module, name in modules_by_call(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _like(value: Tensor | None, mine: Tensor) -> Tensor:
    """Copy a tensor of the trainer into the form of the engine's, or return zeros where it has none (a residual).

    It is a copy, because vLLM rotates queries and keys in place.
    """
    return torch.zeros_like(mine) if value is None else value.to(mine.dtype, copy=True).view(mine.shape)


def trainer_pass(folder: str, precision: str, token_ids: list[int], zero: bool) -> tuple[list[str], Recorded]:
    """Return the names of the trainer's decoder layers, and what its pass computes."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.dtensor.backend import DTensorBackend
    from nemo_rl.models.policy.workers.rank import PolicyWorker

    if zero:
        compute_rows_alike()
    config = PolicyConfig.build(
        model_name=folder,
        precision=precision,
        max_total_sequence_length=len(token_ids) + 1,
        generation=None,
        sequence_packing={"enabled": False},
    )
    worker = PolicyWorker(DTensorBackend(config, torch.device("cpu"), init_optimizer=False), config)
    rows = {"input_ids": torch.tensor([token_ids]), "input_lengths": torch.tensor([len(token_ids)])}
    recorded, model = Recorded(), worker.backend.model.hf
    with recording(model, recorded):
        worker.get_logprobs(BatchedDataDict(rows), [1])
    return list(worker.backend.decoder_layers()), recorded


def engine_model(engine: Any) -> nn.Module:
    """Return the model of an engine of this process."""
    if hasattr(engine, "_model"):
        model: nn.Module = engine._model
        return model
    found: nn.Module = engine._engine.model_executor.driver_worker.model_runner.get_model()
    return found


def engine_passes(settings: EngineSettings, token_ids: list[int], of_trainer: Recorded) -> list[Recorded]:
    """Return what an engine computes by itself, and with the trainer's inputs."""
    if settings.zero_mismatch:
        compute_rows_alike()
    engine: Any = make_engine(settings)
    passes = []
    for own in (False, True):
        model, recorded = engine_model(engine), Recorded()

        async def read() -> None:
            await engine.layer_outputs(token_ids)

        if own:
            with given_inputs(model, of_trainer), recording(model, recorded):
                asyncio.run(read())
        else:
            with recording(model, recorded):
                asyncio.run(read())
        passes.append(recorded)
    return passes


def compared(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the share of equal elements, and the largest difference relative to the largest element."""
    theirs = theirs[: len(ours)]
    return (
        float((ours == theirs).float().mean()),
        float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30)),
    )


def pairs(layer: str, trainer: Recorded, engine: Recorded) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the operations of a layer that both sides have, with their outputs."""
    for operation in OPERATIONS:
        ours, theirs = trainer.find(layer, operation), engine.find(layer, operation)
        if ours is not None and theirs is not None and ours.shape[1] == theirs.shape[1]:
            yield operation, ours, theirs


def require_pairs(layers: Sequence[str], trainer: Recorded, engine: Recorded) -> None:
    """Check that each layer's output and an operation in it can be compared.

    Raises:
        SystemExit: they cannot, because the engine's modules have other names.
    """
    for layer in layers:
        names = [operation for operation, _, _ in pairs(layer, trainer, engine)]
        if "" not in names or len(names) < 2:
            raise SystemExit(
                f"Of {layer}, only {len(names)} operations have the same names in engine and trainer, so the layers "
                "cannot be compared. The program knows the names of transformers (hf) and of vLLM."
            )


def table(layers: Sequence[str], trainer: Recorded, engine: Recorded) -> Iterator[str]:
    """Yield lines with the numbers of each operation in the first and the last layer."""
    yield "| operation | equal bits: first layer | last layer | largest difference: first layer | last layer |"
    yield "|---|---|---|---|---|"
    found = [
        {operation: compared(ours, theirs) for operation, ours, theirs in pairs(layer, trainer, engine)}
        for layer in (layers[0], layers[-1])
    ]
    for operation in OPERATIONS:
        cells = [numbers.get(operation) for numbers in found]
        if any(cells):
            equal = " | ".join("-" if cell is None else f"{cell[0]:.1%}" for cell in cells)
            largest = " | ".join("-" if cell is None else f"{cell[1]:.1e}" for cell in cells)
            yield f"| {operation or 'the layer'} | {equal} | {largest} |"


def first_difference(layers: Sequence[str], trainer: Recorded, engine: Recorded) -> str:
    """Return the name of the first operation whose output has other bits."""
    for layer in layers:
        for operation, ours, theirs in pairs(layer, trainer, engine):
            equal, largest = compared(ours, theirs)
            if equal < 1:
                return f"first difference: {layer}, {operation or 'its output'} ({largest:.1e}, {equal:.1%} equal)"
    return "no difference"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model and its tokenizer")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"))
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--zero-mismatch", action="store_true", help="compute rows alike on both sides, with hf")
    given = parser.parse_args(arguments)
    token_ids = load_tokenizer(given.model)(TEXT)["input_ids"]
    asked = (given.model, given.precision, token_ids, given.zero_mismatch)
    ((layers, trainer),) = on_ranks(trainer_pass, 1, *asked)
    os.environ.update({"RANK": "0"} | engine_kind(given.engine).environment("cpu"))
    settings = EngineSettings(
        *(given.engine, given.model, given.model, "cpu", given.precision, len(token_ids) + 8),
        kv_cache_bytes=256 << 20,
        load_weights=True,
        zero_mismatch=given.zero_mismatch,
    )
    own, with_inputs = engine_passes(settings, token_ids, trainer)
    require_pairs(layers, trainer, own)
    lines = [f"{given.engine} and the trainer, {given.precision}, {len(token_ids)} tokens, {len(layers)} layers", ""]
    lines += [*table(layers, trainer, own), "", first_difference(layers, trainer, own), ""]
    lines += ["with the trainer's inputs:", "", *table(layers, trainer, with_inputs)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
