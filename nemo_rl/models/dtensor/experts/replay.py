"""Make the routers of transformers' models choose recorded experts.

A router computes its scores, calls `torch.topk` for the last time to choose k of its E experts, and makes their weights
from its own scores. Here the result of that call is replaced: the recorded experts, with the scores that the router
itself gives them. So scores, renormalization, correction biases, scaling factors and all gradients are the model's own,
for every architecture whose router works in this way; `require_replayable` tries the routers and refuses others.

Invariant: a token without recorded experts gets bit for bit what the router would choose. The recorded experts of a
microbatch hold until the next one, because layers may be computed again in the backward pass. A pipeline, in which
passes of other microbatches come between, names the microbatch again before each backward pass.

Source of the method: Rollout Routing Replay (Ma et al. 2025, arXiv:2510.11370).
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.experts.balance import find_routers
from nemo_rl.models.dtensor.experts.parallel import find_experts, num_experts
from nemo_rl.models.router_replay.layout import ReplayCounts, require_layers
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.utils.errors import ConfigError

_TOPK = (torch.topk, Tensor.topk)


def check_configuration(config: PretrainedConfig) -> None:
    """Call `require_replayable` for a model that is made on the meta device (seconds for the largest ones).

    Raises:
        ConfigError: as `require_replayable`.
    """
    with torch.device("meta"), no_init_weights():
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    require_replayable(hf)


def require_replayable(hf: PreTrainedModel) -> None:
    """Try the first router of each class with random weights, tokens and experts; the model needs no weights.

    Raises:
        ConfigError: the model has no experts, or a router does not choose them in a way that can be replayed.
    """
    experts, routers = list(find_experts(hf).values()), find_routers(hf)
    if not experts or len(experts) != len(routers):
        raise ConfigError(_refusal(hf, "has no routers that can be replayed"))
    first = {type(router): (router, of_layer) for router, of_layer in zip(routers[::-1], experts[::-1], strict=True)}
    if not all(_can_replay(router, num_experts(each), _experts_of_a_token(hf)) for router, each in first.values()):
        raise ConfigError(_refusal(hf, "chooses experts in a way that cannot be replayed"))


class ReplayedRouters:
    """The routers of a model, which choose the recorded experts of the current microbatch.

    Args:
        hf: a model with experts, before layers or experts are divided among ranks.
        device: device on which the model computes.
        tensor: mesh of the tensor-parallel ranks, which may divide the tokens of a block.

    Raises:
        ConfigError: the model has no experts, or a router does not choose them in a way that can be replayed.
    """

    def __init__(self, hf: PreTrainedModel, device: torch.device, tensor: DeviceMesh | None = None) -> None:
        require_replayable(hf)
        experts, routers = list(find_experts(hf).values()), find_routers(hf)
        self.counts = ReplayCounts(device)
        """Counts the tokens of an update."""
        self._parts, self._part = (1, 0) if tensor is None else (tensor.size(), tensor.get_local_rank())
        self._experts: Tensor | None = None
        self._of_token = _experts_of_a_token(hf)
        self._layers = len(routers)
        for layer, (router, of_layer) in enumerate(zip(routers, experts, strict=True)):
            forward: Any = partial(self._route, router.forward, layer, num_experts(of_layer))
            router.forward = forward

    def use(self, inputs: ModelInputs) -> None:
        """Replay the experts of a microbatch from now on, until the next call.

        Raises:
            ConfigError: they are those of another model.
        """
        self._experts = inputs.routed_experts
        if self._experts is not None:
            require_layers(self._experts, self._layers, self._of_token)

    def count(self, microbatches: Sequence[ModelInputs]) -> None:
        """Count the tokens of microbatches for the metrics of an update."""
        for inputs in microbatches:
            real = inputs.real_tokens
            if real is None:
                real = torch.ones_like(inputs.model_inputs["input_ids"], dtype=torch.bool)
            self.counts.add(inputs.routed_experts, real)

    def stop(self) -> None:
        """Let the routers choose again."""
        self._experts = None

    def _route(self, forward: Any, layer: int, number: int, *args: Any, **kwargs: Any) -> Any:
        if self._experts is None:
            return forward(*args, **kwargs)
        with _Chosen(partial(self._of_rows, self._experts[..., layer, :]), number):
            return forward(*args, **kwargs)

    def _of_rows(self, experts_btk: Tensor, rows: int) -> Tensor:
        """Return the experts `[N, k]` int64 of the rows of a router, which may be a part of the tokens."""
        if experts_btk.shape[:2].numel() != rows:  # as `balance.ExpertBalance` divides them
            missing = -experts_btk.shape[1] % self._parts
            padded = nn.functional.pad(experts_btk, (0, 0, 0, missing), value=-1)
            experts_btk = padded.chunk(self._parts, 1)[self._part]
        return experts_btk.flatten(0, 1).long()


class _Chosen(TorchFunctionMode):
    """Replaces the choice of k among E experts while a router runs.

    Args:
        recorded: returns `[N, k]` int64 for N rows, -1 where the router chooses.
        number: E.
    """

    def __init__(self, recorded: Any, number: int) -> None:
        super().__init__()
        self._recorded, self._number = recorded, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = args[0] if func in _TOPK and args else None
        # Groups of experts are chosen before, from scores of another shape.
        if scores is None or scores.dim() != 2 or scores.shape[1] != self._number:
            return result
        own = result.indices
        recorded = self._recorded(len(scores))
        if recorded.shape != own.shape:
            return result
        chosen = torch.where(recorded < 0, own, recorded)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _experts_of_a_token(hf: PreTrainedModel) -> int:
    config = hf.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
    found: Sequence[int] = [value for name in names if isinstance(value := getattr(config, name, None), int)]
    if not found:
        raise ConfigError(_refusal(hf, "does not say how many experts a token has"))
    return found[0]


@torch.no_grad()
def _can_replay(router: nn.Module, number: int, of_token: int) -> bool:
    """Return whether a copy of a router with random weights chooses given experts, with weights that are not 0."""
    tried = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in [*tried.parameters(), *tried.buffers()]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    width = max(parameter.shape[-1] for parameter in tried.parameters())
    asked = torch.stack([torch.randperm(number, generator=generator)[:of_token] for _ in range(2 * number)])
    with _Chosen(lambda rows: asked, number):
        outputs = tried(torch.randn(len(asked), width, generator=generator))
    tensors = [each for each in outputs if isinstance(each, Tensor)] if isinstance(outputs, tuple) else []
    of_choice = [each for each in tensors if each.shape == asked.shape]
    chose = any(torch.equal(each, asked) for each in of_choice)
    weights = [each for each in of_choice if each.is_floating_point()]
    return chose and bool(weights) and all(bool((each != 0).all()) for each in weights)


def _refusal(hf: nn.Module, what: str) -> str:
    return (
        f"policy.router_replay.enabled=true: {type(hf).__name__} {what}. Set policy.router_replay.enabled=false; "
        "truncated importance sampling (loss_fn.use_importance_sampling_correction) corrects the difference to the "
        "engine on average."
    )
