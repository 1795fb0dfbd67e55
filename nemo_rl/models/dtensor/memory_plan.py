"""Predicted memory of each rank: what stays, what each moment of a step adds to it, and where the peak is.

`memory_trace` counts what the model holds on one rank; here the axes of the mesh divide it. A moment is a point of the
step at which memory can be largest; what is held then is added up by kind, so that the table says what to change.

Invariant: bytes are those that torch's allocator hands out on one rank, the largest of a pipeline's stages; what other
libraries and fragmentation take comes on top. Sources: Korthikanti et al. 2022 (arXiv:2205.05198) for what sequence
parallelism divides.
"""

from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Moment, microbatches_in_flight
from nemo_rl.models.capacity.memory_trace import GRADIENT_OF_LOGITS, Activations, Parameters
from nemo_rl.models.capacity.rank_memory import RankMemory
from nemo_rl.models.dtensor.parallelize import KEPT_OPERATORS

_MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "adadelta": 2, "lion": 1}
_LAYERS_GATHERED = 3
"""Layers whose parameters lie gathered: the one at work, its flat copy, and the next one's. A pipeline stage gathers
all of its layers once for all microbatches."""


class DTensorRank(RankMemory):
    """A rank of the PyTorch-native backend."""

    kept_operators = KEPT_OPERATORS

    @property
    def _layers(self) -> range:
        """Layers of the stage: the first stages have one more where they do not divide."""
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
        """Elements of a rank with FSDP's parts gathered."""
        layout = self.layout
        experts = parameters.experts / (layout.ep if layout.ep > 1 else layout.tp)
        return parameters.matrices / layout.tp + parameters.vectors + experts

    def _held(self, parameters: Parameters) -> float:
        """Elements that a rank stores."""
        layout = self.layout
        experts = parameters.experts / (self._shards * layout.tp)
        return (parameters.matrices / layout.tp + parameters.vectors) / self._shards + experts

    def plan(self) -> MemoryPlan:
        """All moments of a step."""
        own = [self.trace.layers[index] for index in self._layers] + self.outside
        stored = sum(self._held(parameters) for parameters in own)
        lora = self.policy.dtensor_cfg.lora_cfg
        trained = stored if not lora.enabled else self.trace.linears * lora.dim / (self._shards * self.layout.pp)
        weights = {"weights": stored * self._weight_size + (trained * WIDE if lora.enabled else 0.0)}
        host = self._host(stored)
        stays = weights | (host if self.work.on_cpu else {})
        if self.work.trains:
            stays |= {"optimizer state": trained * WIDE * self._moments_per_weight()}
        moments = self._training(trained * WIDE) if self.work.trains else {"forward pass": self._pass()}
        if self.policy.dtensor_cfg.cpu_offload and not self.work.on_cpu:
            host |= stays | {"gradients": trained * WIDE * self.work.trains}
            stays = {}
            moments = {name: {**held, "gradients": 0.0} for name, held in moments.items()}
        missing = "" if self.trace.activations else "Activations are not known for this architecture."
        return MemoryPlan(stays, moments, {} if self.work.on_cpu else host, missing)

    @property
    def _weight_size(self) -> int:
        """A frozen model on a GPU is held in the precision it computes in."""
        frozen = not self.work.trains and not self.work.keeps_reference and not self.work.on_cpu
        return self.itemsize if frozen else WIDE

    def _moments_per_weight(self) -> int:
        """Float32 numbers that the optimizer keeps of each weight."""
        assert self.policy.optimizer is not None, "a model that is trained has an optimizer"
        name = self.policy.optimizer.name.rpartition(".")[2].lower()
        if name == "sgd":
            return int(bool(self.policy.optimizer.kwargs.get("momentum")))
        return _MOMENTS.get(name, 2)

    def _host(self, stored: float) -> dict[str, float]:
        """What is copied to host memory: initial weights, and the weights that they take turns with."""
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
            "head backward": earlier | {"activations": kept, "logits": logits},
            "layer backward": earlier | {"activations": kept + again, "logits": self.head},
            "embedding backward": gathered | unreduced | {"gradients": gradients, "activations": again},
            "update": {"gradients": gradients} | update,
        }

    def _pass(self) -> dict[str, float]:
        """A forward pass without a backward one: what a layer and the head need at a time."""
        root = sum(self._gathered(parameters) for parameters in self.outside)
        one = max((self._kept(each) for each in self.trace.activations), default=0.0)
        return {"gathered weights": self._gathered_at_once(root), "activations": one, "logits": self.logits(2)}

    def _gathered_at_once(self, root: float) -> float:
        """Bytes of gathered weights: `root` elements outside of the layers, and some layers; all of a stage's."""
        if not self._uses_fsdp:
            return 0.0
        sizes = [self._gathered(self.trace.layers[index]) for index in self._layers]
        layers = sum(sizes) if self.layout.pp > 1 else _LAYERS_GATHERED * max(sizes, default=0.0)
        return (root + layers) * self.itemsize

    def _activations(self) -> tuple[float, float]:
        """What the backward pass needs of all microbatches under way on the stage, and what it computes again."""
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
        """Bytes of one microbatch in a layer, of which `tokens` are this rank's."""
        layout = self.layout
        sharing = layout.tp if self.policy.dtensor_cfg.sequence_parallel else 1
        gathers = layout.cp > 1 and self.policy.dtensor_cfg.context_parallel_method == "all_gather"
        # Whole rows; without a kernel for pieces also the keys of each piece, about as many. Shared prompts, which
        # context parallelism does not know, are laid out before each of their rows.
        rows = layout.cp * (1 + self.work.on_cpu) if gathers else self.work.keys_per_token
        inside = (each.inside + each.keys_values * rows) / layout.tp
        return each.outside / sharing + each.into_blocks + inside
