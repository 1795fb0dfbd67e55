"""Predict the memory of each rank: what it holds all the time, what each moment of a step adds, and the peak.

`memory_trace` counts what the model holds on one rank; this module divides it by the axes of the mesh. A moment is a
point of the step at which memory can be largest. Memory at a moment is summed by kind, so that the table shows which
setting to change.

Invariant: bytes are those that torch's allocator hands out on one rank, for the largest stage of a pipeline; memory of
other libraries and fragmentation is not included. Source: Korthikanti et al. 2022 (arXiv:2205.05198) for the tensors
that sequence parallelism divides.
"""

from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Moment, microbatches_in_flight
from nemo_rl.models.capacity.memory_trace import GRADIENT_OF_LOGITS, Activations, Parameters
from nemo_rl.models.capacity.rank_memory import RankMemory
from nemo_rl.models.dtensor.parallelize import KEPT_OPERATORS

_MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "adadelta": 2, "lion": 1}
_LAYERS_GATHERED = 3
"""Gathered parameters in memory at once, in units of one layer: the current layer, its flat copy, and the next layer.
A pipeline stage instead gathers all of its layers once for all microbatches."""


class DTensorRank(RankMemory):
    """A rank of the PyTorch-native backend."""

    kept_operators = KEPT_OPERATORS

    @property
    def _layers(self) -> range:
        """Layers of the stage; the first stages have one more if the layers do not divide evenly."""
        total, stages = len(self.trace.layers), self.layout.pp
        size, more = divmod(total, stages)
        first = self.stage * size + min(self.stage, more)
        return range(first, first + size + (self.stage < more))

    @property
    def _uses_fsdp(self) -> bool:
        offload = self.policy.dtensor_cfg.cpu_offload
        return self.layout.num_ranks > self.layout.pp or self.itemsize != WIDE or offload

    @property
    def _shards(self) -> int:
        return self.layout.dp_shard * self.layout.cp

    def _gathered(self, parameters: Parameters) -> float:
        """Return the number of elements on a rank after FSDP has gathered its shards."""
        layout = self.layout
        experts = parameters.experts / (layout.ep if layout.ep > 1 else layout.tp)
        return parameters.matrices / layout.tp + parameters.vectors + experts

    def _held(self, parameters: Parameters) -> float:
        """Return the number of elements that a rank stores."""
        layout = self.layout
        experts = parameters.experts / (self._shards * layout.tp)
        return (parameters.matrices / layout.tp + parameters.vectors) / self._shards + experts

    def plan(self) -> MemoryPlan:
        """Predict the memory of all moments of a step."""
        own = [self.trace.layers[index] for index in self._layers] + self.outside
        stored = sum(self._held(parameters) for parameters in own)
        lora = self.policy.dtensor_cfg.lora_cfg
        trained = stored if not lora.enabled else self.trace.linears * lora.dim / (self._shards * self.layout.pp)
        weights = {"weights": stored * self._weight_size + (trained * WIDE if lora.enabled else 0.0)}
        host = self._host(stored)
        stays = weights | (host if self.work.on_cpu else {})
        if self.work.trains:
            stays |= {"optimizer state": trained * WIDE * self._moments_per_weight()} | self.draft_model(self._shards)
        moments = self._training(trained * WIDE) if self.work.trains else {"forward pass": self._pass()}
        if self.policy.dtensor_cfg.cpu_offload and not self.work.on_cpu:
            host |= stays | {"gradients": trained * WIDE * self.work.trains}
            stays = {}
            moments = {name: {**held, "gradients": 0.0} for name, held in moments.items()}
        missing = "" if self.trace.activations else "Activations are not known for this architecture."
        return MemoryPlan(stays, moments, {} if self.work.on_cpu else host, missing)

    @property
    def _weight_size(self) -> int:
        """Bytes per stored weight; a frozen model on a GPU is stored in its compute precision."""
        frozen = not self.work.trains and not self.work.keeps_reference and not self.work.on_cpu
        return self.itemsize if frozen else WIDE

    def _moments_per_weight(self) -> int:
        """Return how many float32 numbers the optimizer keeps for each weight."""
        assert self.policy.optimizer is not None, "a model that is trained has an optimizer"
        name = self.policy.optimizer.name.rpartition(".")[2].lower()
        if name == "sgd":
            return int(bool(self.policy.optimizer.kwargs.get("momentum")))
        return _MOMENTS.get(name, 2)

    def _host(self, stored: float) -> dict[str, float]:
        """Return the bytes in host memory: the initial weights, and the space for the weights they are swapped with."""
        if not self.work.keeps_reference or self.policy.dtensor_cfg.lora_cfg.enabled:
            return {}
        return {"reference weights and their place": 2 * stored * WIDE}

    def _training(self, gradients: float) -> dict[str, Moment]:
        root = sum(self._gathered(parameters) for parameters in self.outside)
        logits = self.logits(GRADIENT_OF_LOGITS) + 2 * self.head
        fsdp = self._uses_fsdp
        gathered = {"gathered weights": self._gathered_at_once(root)}
        earlier = gathered | {"gradients": gradients if self.work.several else 0.0}
        kept, again = self._activations()
        unreduced = {"gradients before their reduction": root * (self.itemsize + WIDE) if fsdp else 0.0}
        update = {"optimizer's temporaries": 2 * self.largest / self._shards * WIDE if self.work.on_cpu else 0.0}
        return {
            "head backward": earlier | {"activations": kept + self.scalar_head(), "logits": logits},
            "layer backward": earlier | {"activations": kept + again, "logits": self.head},
            "embedding backward": gathered | unreduced | {"gradients": gradients, "activations": again},
            "update": {"gradients": gradients} | update,
        }

    def _pass(self) -> dict[str, float]:
        """Return the memory of a forward pass without backward: one layer and the head at a time."""
        root = sum(self._gathered(parameters) for parameters in self.outside)
        one = max((self._kept(each) for each in self.trace.activations), default=0.0)
        return {"gathered weights": self._gathered_at_once(root), "activations": one, "logits": self.logits(2)}

    def _gathered_at_once(self, root: float) -> float:
        """Return the bytes of weights that are gathered at the same time.

        These are the `root` elements outside of the layers and a few layers, or all layers of the rank if they stay.
        """
        if not self._uses_fsdp:
            return 0.0
        sizes = [self._gathered(self.trace.layers[index]) for index in self._layers]
        stay = self.layout.pp > 1 or self.policy.dtensor_cfg.keep_gathered
        layers = sum(sizes) if stay else _LAYERS_GATHERED * max(sizes, default=0.0)
        return (root + layers) * self.itemsize

    def _activations(self) -> tuple[float, float]:
        """Return the bytes of activations kept for all microbatches in flight, and the bytes that are recomputed."""
        activations = [self.trace.activations[index] for index in self._layers] if self.trace.activations else []
        how = self.policy.dtensor_cfg.activation_checkpointing
        sharing = self.layout.tp if self.policy.dtensor_cfg.sequence_parallel else 1
        whole, again = sum(self._kept(each) for each in activations), 0.0
        if how:
            again = max((self._kept(each) for each in activations), default=0.0)
            whole = sum(each.entry / sharing for each in activations)
        if how == "selective":
            whole += sum(each.kept / self.layout.tp for each in activations)
            again -= max((each.kept / self.layout.tp for each in activations), default=0.0)
        hidden = 2 * self.tokens * self.trace.hidden * self.itemsize / sharing
        in_flight = microbatches_in_flight(self.stage, self.layout.pp, self.policy.dtensor_cfg.virtual_pipeline_size)
        return whole * in_flight + self.trace.others / sharing + hidden, again

    def _kept(self, each: Activations) -> float:
        """Return the bytes that a layer keeps for one microbatch, with `tokens` tokens on this rank."""
        layout = self.layout
        sharing = layout.tp if self.policy.dtensor_cfg.sequence_parallel else 1
        gathers = layout.cp > 1 and self.policy.dtensor_cfg.context_parallel_method == "all_gather"
        # With all_gather: keys of whole rows; CPUs, which have no kernel for pieces, also copy the keys of each piece,
        # about as many again. Otherwise: shared prompts, which context parallelism does not support, are repeated
        # before each of their rows.
        rows = layout.cp * (1 + self.work.on_cpu) if gathers else self.work.keys_per_token
        inside = (each.inside + each.keys_values * rows) / layout.tp
        return each.outside / sharing + each.into_blocks + inside
