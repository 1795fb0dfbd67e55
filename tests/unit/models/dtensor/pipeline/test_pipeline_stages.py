"""The parts of a model that a stage keeps, models that cannot be divided, and stages that do not answer."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from architectures import random_model
from parity.compare import difference
from parity.every_type import save_tiny_model, tiny_model
from parity.ranks import mesh_numbers
from parity.reference import one_process
from pipeline_helpers import CPU, Case, layers, microbatches, save_model
from policy_helpers import free_port, run_ranks
from torch import nn

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.process_group import collective_timeout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.pipeline import runner
from nemo_rl.models.dtensor.pipeline.runner import HiddenStates
from nemo_rl.models.dtensor.pipeline.stages import Place, active, cut, layers_of_chunks, require_divisible, try_division
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.utils.errors import ConfigError


def _place(number: int, size: int, num_layers: int, per_stage: int = 1) -> Place:
    return Place(number, size, layers_of_chunks(num_layers, size, per_stage))


def test_layers_are_divided_evenly() -> None:
    for num_layers, stages, per_stage in ((7, 2, 1), (7, 3, 2), (61, 4, 3), (4, 4, 1)):
        chunks = layers_of_chunks(num_layers, stages, per_stage)
        assert [layer for chunk in chunks for layer in chunk] == list(range(num_layers))
        assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
        of_stage = [len(_place(stage, stages, num_layers, per_stage).layers) for stage in range(stages)]
        assert max(of_stage) - min(of_stage) <= 1
    assert _place(1, 2, 5, 2).layers == [2, 4]


@pytest.mark.parametrize(
    ("layers_stages_chunks", "message"),
    [
        ((3, 4, 1), r"pipeline_parallel_size=4 x virtual_pipeline_size=1 = 4 chunks .* 3 layers\. Use .*size=3\."),
        ((5, 3, 2), r"=3 x virtual_pipeline_size=2 = 6 chunks .* 5 layers\. Use pipeline_parallel_size=2\."),
        ((2, 2, 3), r"= 6 chunks of layers, but the model has 2 layers\. Use a smaller virtual_pipeline_size\."),
    ],
)
def test_more_chunks_than_layers_are_refused_with_the_arithmetic(layers_stages_chunks, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of_chunks(*layers_stages_chunks)


def test_a_stage_keeps_its_own_weights_under_their_names() -> None:
    whole = set(random_model("qwen3", num_hidden_layers=5).state_dict())
    kept = []
    for number in range(3):
        hf = random_model("qwen3", num_hidden_layers=5)
        stage = cut(hf, _place(number, 3, 5))
        kept.append(set(hf.state_dict()))
        assert stage.elsewhere == whole - kept[-1]
    assert set().union(*kept) == whole and sum(map(len, kept)) == len(whole)
    assert "model.embed_tokens.weight" in kept[0] and {"model.norm.weight", "lm_head.weight"} <= kept[2]
    assert "model.layers.2.mlp.up_proj.weight" in kept[1] and "model.layers.4.mlp.up_proj.weight" in kept[2]


def test_a_body_inside_another_module_is_kept() -> None:
    """Gemma 4's unified models can read images; without these parts, they are like a text model with another name."""
    whole, kept = set(tiny_model("gemma4_unified").state_dict()), []
    for number in range(2):
        hf = tiny_model("gemma4_unified")
        cut(hf, _place(number, 2, 4))
        kept.append(set(hf.state_dict()))
        assert (hf.get_input_embeddings() is None) == (number == 1)
        assert (hf.get_output_embeddings() is None) == (number == 0)
    assert set().union(*kept) == whole
    assert "model.language_model.layers.1.mlp.up_proj.weight" in kept[0]
    assert "model.language_model.layers.2.mlp.up_proj.weight" in kept[1]


def test_ranks_without_the_embedding_of_such_a_model_equal_one_process(tmp_path) -> None:
    """Its own code raises an error where it does not find the embedding."""
    model = save_tiny_model("gemma4_unified", tmp_path / "m")
    mesh = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    ours = mesh_numbers(model, mesh, 4, packed=True, steps=1, dtype=torch.float64)
    found = difference(ours, one_process(model, 1))
    assert found.largest < 1e-9, found


def test_a_tied_weight_is_known_by_one_name() -> None:
    hf = random_model("llama", num_hidden_layers=4, tie_word_embeddings=True)
    stage = cut(hf, _place(1, 2, 4))
    assert stage.known_as("lm_head.weight") == "model.embed_tokens.weight"
    assert stage.shared == stage.copies == {"model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" not in stage.elsewhere
    assert not cut(random_model("llama", num_hidden_layers=4, tie_word_embeddings=True), _place(0, 2, 4)).copies


def test_a_failed_pass_restores_the_modules_of_the_model() -> None:
    hf = random_model("phi", num_hidden_layers=4)
    before = {name: id(module) for name, module in hf.named_modules()}
    with pytest.raises(RuntimeError, match="stopped"), active(hf, _place(0, 2, 4), 0):
        assert hf.base_model.final_layernorm is not before
        raise RuntimeError("stopped")
    assert {name: id(module) for name, module in hf.named_modules()} == before


def test_dropout_of_embeddings_acts_in_the_first_chunk_only() -> None:
    hf = random_model("phi", num_hidden_layers=2, embd_pdrop=0.5, resid_pdrop=0.0, attention_dropout=0.0).train()
    for layer in hf.base_model.layers:
        layer.resid_dropout.p = 0.0
    hidden = torch.randn(1, 6, 64)
    place = _place(1, 2, 2)

    def run(chunk: int) -> torch.Tensor:
        with active(hf, place, chunk):
            return hf.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(0), run(0))


@pytest.mark.parametrize(("model_type", "why"), [("gptj", "no list of decoder layers"), ("opt", "no list|more than")])
def test_a_model_with_an_unknown_body_is_refused_by_name(model_type, why) -> None:
    hf = random_model(model_type)
    with pytest.raises(
        ConfigError, match=rf"{type(hf).__name__} cannot be divided .*({why}).*pipeline_parallel_size=1"
    ):
        cut(hf, Place(0, 2, (range(1), range(1, 2))))


def test_a_model_with_a_tower_for_images_is_refused_by_name() -> None:
    hf = tiny_model("gemma3")
    with pytest.raises(ConfigError, match="cannot be divided into pipeline stages: it has parts that read images"):
        require_divisible(hf, Place(0, 2, (range(1), range(1, 2))))


def test_what_a_forward_does_before_and_after_its_layers_is_done_once() -> None:
    hf = random_model("llama", num_hidden_layers=4)
    require_divisible(hf, _place(0, 2, 4, 2))
    forward = hf.base_model.forward

    def scaled(*args, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = hf.base_model.embed_tokens(kwargs.pop("input_ids"))
        output = forward(*args, inputs_embeds=2.0 * inputs_embeds, **kwargs)
        output.last_hidden_state = output.last_hidden_state + 1.0
        return output

    hf.base_model.forward = scaled
    require_divisible(hf, _place(0, 2, 4))
    assert hf.base_model.forward is scaled


@pytest.mark.parametrize(("model_type", "special"), [("granite", {"embedding_multiplier": 3.0}), ("olmo", {})])
def test_embedding_multipliers_and_norms_without_weights_act_once(model_type, special) -> None:
    hf = random_model(model_type, num_hidden_layers=3, **special)
    require_divisible(hf, Place(0, 2, (range(2), range(2, 3))))
    try_division(random_model(model_type, num_hidden_layers=1, **special))


def test_a_model_with_one_layer_is_cut_before_the_layer() -> None:
    """Only a layer of a later chunk would lack what a layer reads from the body besides the hidden states."""
    hf = random_model("llama", num_hidden_layers=1)
    part, layer = hf.base_model, hf.base_model.layers[0]
    own = layer.forward

    def with_tokens(hidden, *args, **kwargs):
        return own(hidden, *args, **kwargs) + part.of_tokens

    def keep_embeddings(module, args, kwargs):
        ids = kwargs.get("input_ids")
        part.of_tokens = 0.0 if ids is None else part.embed_tokens(ids)

    layer.forward = with_tokens
    part.register_forward_pre_hook(keep_embeddings, with_kwargs=True)
    with pytest.raises(ConfigError, match="do not compute what the whole model computes"):
        try_division(hf)


def test_layers_that_share_activations_are_refused() -> None:
    class Remembering(nn.Module):
        def __init__(self, layer: nn.Module, shared: list[torch.Tensor]) -> None:
            super().__init__()
            self.layer, self.shared = layer, shared

        def forward(self, hidden, **kwargs):
            out = self.layer(hidden, **kwargs) + sum(self.shared)
            self.shared.append(out)
            return out

    hf = random_model("llama", **layers("llama", 4))
    shared: list[torch.Tensor] = []
    for number, layer in enumerate(hf.base_model.layers):
        hf.base_model.layers[number] = Remembering(layer, shared)
    with pytest.raises(ConfigError, match="do not compute what the whole model computes"):
        require_divisible(hf, _place(0, 2, 4))


def test_a_stage_with_nothing_to_train_is_refused_on_all_ranks() -> None:
    for number in range(2):
        hf = random_model("llama", num_hidden_layers=4)
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(".layers.3." in name)
        with pytest.raises(ConfigError, match=r"nothing is trained in 1 of its 2 stages \(the first: 0\).*lora_cfg"):
            cut(hf, _place(number, 2, 4))


def test_other_weights_shared_between_stages_are_refused() -> None:
    hf = random_model("llama", num_hidden_layers=4)
    hf.base_model.layers[3].mlp.up_proj.weight = hf.base_model.layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"layers\.3\.mlp\.up_proj\.weight is the same weight as model\.layers\.0"):
        cut(hf, _place(0, 2, 4))


def test_hidden_states_have_the_shape_of_the_tokens_of_the_rank() -> None:
    (rows,) = microbatches(1, 1)
    padded = build_training_inputs(rows, InputLayout(packed=False, round_to=4), CPU)
    packed = build_training_inputs(rows, InputLayout(packed=True, round_to=4), CPU)
    tokens = -(-int(rows["input_lengths"].sum()) // 4) * 4
    widest = -(-int(rows["input_lengths"].max()) // 4) * 4
    assert HiddenStates(64, torch.float32).shape(packed) == (1, tokens, 64)
    assert HiddenStates(64, torch.float32, token_parts=2).shape(padded) == (len(rows["input_ids"]), widest // 2, 64)


def test_stages_draw_their_own_random_numbers() -> None:
    layout = ParallelLayout(pp=2, dp_shard=2)
    assert [layout.random_path(rank) for rank in range(4)] == [(0,), (1,), (0, 1), (1, 1)]


def test_the_timeout_is_that_of_the_default_group() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert collective_timeout(CPU) == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def _alone(rank: int, world_size: int, name: str) -> None:
    """Run the first stage without the other one."""
    runner.collective_timeout = lambda device: timedelta(seconds=1)
    config = Case().config(name)
    backend = DTensorBackend(config, CPU, ParallelLayout.of(config, world_size), init_reference_model=False)
    rows = microbatches(0, 3)
    inputs = [build_training_inputs(each, InputLayout(packed=False), CPU) for each in rows]
    if rank == 1:
        time.sleep(60)
    backend.run(inputs, lambda *scores: None, backward=False)


def test_a_missing_stage_is_noticed_within_the_timeout(tmp_path) -> None:
    began = time.monotonic()
    with pytest.raises(mp.ProcessRaisedException, match="1000 ?ms"):
        run_ranks(_alone, 2, save_model(tmp_path / "m", "llama", num_layers=2))
    assert time.monotonic() - began < 30
