"""Measure the load of routers of mixtures of experts, compute their auxiliary loss, freeze them, and replay experts.

`ExpertBalance` measures how evenly routers distribute tokens over experts, and computes the auxiliary loss. Metrics and
loss are ratios of sums over all tokens of an optimizer update on all ranks. They do not depend on how the rows are
divided into microbatches or among ranks. Padding does not count. If several ranks see the same tokens (tensor
parallelism), all sums grow by the same factor and the ratios stay the same.

The auxiliary loss is the one that transformers adds to the loss of a causal language model
(`load_balancing_loss_func`), over the tokens of all layers together:

    coefficient * E * sum_e f_e P_e    f_e: share of tokens that choose expert e; P_e: mean probability of expert e

The f_e of the whole update must be known before the first backward pass, so an update begins with a *survey*: a forward
pass of all its microbatches without gradients. Each microbatch then adds its own part of the P_e to the sum. Source:
Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).

`ReplayedRouters` makes routers choose recorded experts. A router computes scores, chooses k of its E experts by a call
of `torch.topk`, and computes the weights of these experts from their scores. The replay replaces the result of that
call by the recorded experts and the router's own scores of these experts. All other computations (scores,
renormalization, correction biases, scaling factors, gradients) are the model's own. `require_replayable` refuses models
whose routers work differently.

Invariant: for a token without recorded experts the router's own choice stays, bit for bit. The recorded experts of a
microbatch are used until the next call of `use`, because layers may be computed again in the backward pass. A pipeline
alternates between microbatches, so it calls `use` before each backward pass too. Source of the method: Rollout Routing
Replay (Ma et al. 2025, arXiv:2510.11370).
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.models.dtensor.expert_parallel import find_experts, num_experts
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.expert_routing import ReplayCounts, load_metrics, require_layers
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_ROUTER_NAMES = ("gate", "router")
"""Names that transformers gives to a router module that is a sibling of the experts."""


def find_routers(hf: nn.Module, experts: Iterable[str] | None = None) -> list[nn.Module]:
    """Return the routers of experts, in the order of layers.

    Args:
        experts: names of the modules of experts. If None, those of `find_experts`.
    """
    names = find_experts(hf) if experts is None else experts
    blocks = [hf.get_submodule(name.rpartition(".")[0]) for name in names]
    return [child for block in blocks for name, child in block.named_children() if name in _ROUTER_NAMES]


def freeze_routers(hf: PreTrainedModel) -> None:
    """Freeze the routers' weights. The routing may still change with the hidden states."""
    routers = find_routers(hf)
    if not routers:
        logger.info("policy.dtensor_cfg.freeze_moe_router has no effect: %s has no routers.", type(hf).__name__)
    for router in routers:
        router.requires_grad_(False)


def configured_coefficient(config: PretrainedConfig, asked: float | None) -> float:
    """Return the factor of the auxiliary loss that the configuration sets.

    Args:
        asked: argument of `auxiliary_coefficient`.
    """
    if asked is not None:
        return float(asked)
    own = getattr(config, "router_aux_loss_coef", None) or 0.0
    return float(own) if getattr(config, "output_router_logits", False) else 0.0


def auxiliary_coefficient(hf: PreTrainedModel, asked: float | None) -> float:
    """Return the factor of the auxiliary loss, or 0 if there is no such loss.

    Args:
        asked: `policy.dtensor_cfg.moe_aux_loss_coeff`. If None, `router_aux_loss_coef` of the model's configuration if
            its `output_router_logits` is set, and 0 otherwise, as in transformers.

    Raises:
        ConfigError: the factor is not 0, but transformers has no auxiliary loss for the architecture.
    """
    config = hf.config.get_text_config()
    own, coefficient = getattr(config, "router_aux_loss_coef", None), configured_coefficient(config, asked)
    recorded = getattr(hf.base_model, "_can_record_outputs", None) or {}
    if coefficient and (own is None or "router_logits" not in recorded or not find_routers(hf)):
        raise ConfigError(
            f"an auxiliary loss with the coefficient {coefficient} is configured, but transformers defines none for "
            f"{type(hf).__name__}. Set policy.dtensor_cfg.moe_aux_loss_coeff=0."
        )
    return float(coefficient)


class ExpertBalance:
    """Count the tokens of each expert during an optimizer update, and compute the auxiliary loss.

    Args:
        hf: a model with experts, before they are divided among ranks.
        coefficient: result of `auxiliary_coefficient`.
        tensor: mesh of the tensor-parallel ranks, which may divide the tokens of a block.
    """

    def __init__(
        self, hf: PreTrainedModel, coefficient: float, device: torch.device, tensor: DeviceMesh | None = None
    ) -> None:
        experts = list(find_experts(hf).values())
        self.has_loss = coefficient > 0
        self._coefficient, self._device = coefficient, device
        self._parts, self._part = (1, 0) if tensor is None else (tensor.size(), tensor.get_local_rank())
        self._sizes = [num_experts(module) for module in experts]
        self._watching = False
        self._real: Tensor | None = None
        self._logits: list[Tensor] = []
        self._shares: Tensor | None = None
        self.start_update()
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, layer))
        if self.has_loss:
            for router in find_routers(hf):
                router.register_forward_hook(self._keep_logits)

    @contextmanager
    def watching(self, real_tokens: Tensor | None) -> Iterator[None]:
        """Record the routers' decisions while the block runs a microbatch, but not in recomputations.

        Args:
            real_tokens: `[b, T]` bool, True for tokens that are not padding; None if no token is padding.
        """
        self._watching, self._real, self._logits = True, real_tokens, []
        try:
            yield
        finally:
            self._watching = False

    def end_survey(self) -> None:
        """Compute `f_e`, divided by the number of tokens, from the recorded microbatches. The call is collective."""
        counts = torch.stack(self._counts).sum(0)
        dist.all_reduce(counts)
        dist.all_reduce(self._rows)
        self._shares = (counts / self._rows.double().square().clamp(min=1)).float()
        self.start_update()

    def loss(self) -> Tensor:
        """Return this microbatch's part of the auxiliary loss. The loss is the sum of all parts on all ranks."""
        assert self._shares is not None, "the survey comes first"
        shares, logits, self._logits = self._shares, self._logits, []
        loss = sum((self._probabilities(layer) @ shares for layer in logits), torch.zeros((), device=self._device))
        loss = loss * (self._coefficient * len(shares))
        self._loss += loss.detach()
        return loss

    def end_update(self) -> dict[str, float]:
        """Return the metrics of the update, equal on all ranks. The call is collective.

        Returns:
            The metrics of `expert_routing.load_metrics`, and `moe/aux_loss` if there is an auxiliary loss.
        """
        counts = torch.cat(self._counts)
        dist.all_reduce(counts)
        metrics = load_metrics(counts.cpu().split(self._sizes))
        if self.has_loss:
            dist.all_reduce(self._loss)
            metrics["moe/aux_loss"] = self._loss.item()
        self.start_update()
        return metrics

    def start_update(self) -> None:
        """Discard the recorded counts and losses."""
        self._counts = [torch.zeros(size, dtype=torch.int64, device=self._device) for size in self._sizes]
        self._rows = torch.zeros((), dtype=torch.int64, device=self._device)
        self._loss = torch.zeros((), dtype=torch.float32, device=self._device)

    @torch.no_grad()
    def _count(self, layer: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        """Count the tokens of each expert. `args` are hidden states, chosen experts `[N, k]` and their weights."""
        if not self._watching:
            return
        index = args[1]
        real_N = self._real_of(len(index))
        self._counts[layer].index_add_(0, index.flatten(), real_N.repeat_interleave(index.shape[1]))
        self._rows += real_N.sum()

    def _keep_logits(self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        if self._watching and torch.is_grad_enabled():
            self._logits.append(output[0])

    def _probabilities(self, logits_NE: Tensor) -> Tensor:
        """Return the sum `[E]` of the probabilities of the experts over the real tokens."""
        real_N = self._real_of(len(logits_NE))
        return (logits_NE.softmax(-1).float() * real_N[:, None]).sum(0)

    def _real_of(self, rows: int) -> Tensor:
        """Return `[N]` int64 with 1 for real tokens among the rows of a router's input, and 0 for padding."""
        if self._real is None:
            return torch.ones(rows, dtype=torch.int64, device=self._device)
        real = self._real
        if real.numel() != rows:  # `expert_parallel.divide_tokens` has divided them
            real = nn.functional.pad(real, (0, -real.shape[1] % self._parts)).chunk(self._parts, 1)[self._part]
        return real.flatten().long()


def watch_experts(
    hf: PreTrainedModel, config: PolicyConfig, device: torch.device, meshes: Meshes
) -> ExpertBalance | None:
    """Attach an `ExpertBalance` to a model in training before experts are divided. Freeze routers if configured.

    Returns:
        The balance. None for a model without experts, and in a pipeline, whose stages have different layers.

    Raises:
        ConfigError: an auxiliary loss is configured in a pipeline. `mesh_check` finds this before a run.
    """
    if config.dtensor_cfg.freeze_moe_router:
        freeze_routers(hf)
    coefficient = auxiliary_coefficient(hf, config.dtensor_cfg.moe_aux_loss_coeff)
    if coefficient and meshes.layout.pp > 1:
        raise ConfigError(in_a_pipeline(coefficient, meshes.layout.pp, "policy"))
    watched = find_experts(hf) and meshes.layout.pp == 1
    return ExpertBalance(hf, coefficient, device, meshes.tp) if watched else None


def in_a_pipeline(coefficient: float, stages: int, section: str) -> str:
    """Return the error message for an auxiliary loss in a pipeline."""
    return (
        f"the auxiliary loss of experts (coefficient {coefficient:g}) is over the layers of all stages together, "
        f"which {section}.dtensor_cfg.pipeline_parallel_size={stages} takes apart. Set "
        f"{section}.dtensor_cfg.moe_aux_loss_coeff=0."
    )


_TOPK = (torch.topk, Tensor.topk)


def check_configuration(config: PretrainedConfig) -> None:
    """Call `require_replayable` for a model on the meta device, which takes seconds for large models.

    Raises:
        ConfigError: the experts of the model cannot be replayed.
    """
    with torch.device("meta"), no_init_weights():
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    require_replayable(hf)


def require_replayable(hf: PreTrainedModel) -> None:
    """Test the replay on a copy of the first router of each class, with random weights.

    Raises:
        ConfigError: the model has no experts, or its routers choose them in a way that cannot be replayed.
    """
    experts, routers = list(find_experts(hf).values()), find_routers(hf)
    if not experts or len(experts) != len(routers):
        raise ConfigError(_refusal(hf, "has no routers that can be replayed"))
    first = {type(router): (router, of_layer) for router, of_layer in zip(routers[::-1], experts[::-1], strict=True)}
    if not all(_can_replay(router, num_experts(each), _experts_of_a_token(hf)) for router, each in first.values()):
        raise ConfigError(_refusal(hf, "chooses experts in a way that cannot be replayed"))


class ReplayedRouters:
    """Routers of a model that choose the recorded experts of the current microbatch.

    Args:
        hf: a model with experts, before layers or experts are divided among ranks.
        tensor: mesh of the tensor-parallel ranks, which may divide the tokens of a block.

    Raises:
        ConfigError: the model has no experts, or its routers choose them in a way that cannot be replayed.
    """

    def __init__(self, hf: PreTrainedModel, device: torch.device, tensor: DeviceMesh | None = None) -> None:
        require_replayable(hf)
        experts, routers = list(find_experts(hf).values()), find_routers(hf)
        self.counts = ReplayCounts(device)
        """Counter of an update's tokens, with and without recorded experts."""
        self._parts, self._part = (1, 0) if tensor is None else (tensor.size(), tensor.get_local_rank())
        self._experts: Tensor | None = None
        self._of_token = _experts_of_a_token(hf)
        self._layers = len(routers)
        for layer, (router, of_layer) in enumerate(zip(routers, experts, strict=True)):
            forward: Any = partial(self._route, router.forward, layer, num_experts(of_layer))
            router.forward = forward

    def use(self, inputs: ModelInputs) -> None:
        """Replay the experts of a microbatch until the next call.

        Raises:
            ConfigError: the recorded experts are those of another model.
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
        """Stop the replay, so that routers choose the experts themselves."""
        self._experts = None

    def _route(self, forward: Any, layer: int, number: int, *args: Any, **kwargs: Any) -> Any:
        if self._experts is None:
            return forward(*args, **kwargs)
        with _Chosen(partial(self._of_rows, self._experts[..., layer, :]), number):
            return forward(*args, **kwargs)

    def _of_rows(self, experts_btk: Tensor, rows: int) -> Tensor:
        """Return the recorded experts `[N, k]` int64 of a router's tokens, which may be a part of the microbatch's."""
        if experts_btk.shape[:2].numel() != rows:  # `expert_parallel.divide_tokens` has divided them
            missing = -experts_btk.shape[1] % self._parts
            padded = nn.functional.pad(experts_btk, (0, 0, 0, missing), value=-1)
            experts_btk = padded.chunk(self._parts, 1)[self._part]
        return experts_btk.flatten(0, 1).long()


class _Chosen(TorchFunctionMode):
    """Replacement for a router's choice of k among E experts, while the router runs."""

    def __init__(self, recorded: Any, number: int) -> None:
        super().__init__()
        self._recorded, self._number = recorded, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = args[0] if func in _TOPK and args else None
        # # Some routers first choose groups of experts with topk, from scores of another shape.
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
        raise ConfigError(_refusal(hf, "does not define how many experts a token has"))
    return found[0]


@torch.no_grad()
def _can_replay(router: nn.Module, number: int, of_token: int) -> bool:
    """Return whether a router's copy with random weights can choose given experts, with nonzero weights."""
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
