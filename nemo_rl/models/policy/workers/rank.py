"""Start the process of one rank: settings, process group, and the backend that the configuration names.

A worker process builds `PolicyRank` by name. This file only assembles; `base` has the methods of a worker.
"""

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.ranks.process_group import init_process_group
from nemo_rl.distributed.workers.start_phases import start_phase
from nemo_rl.host.device import device_for
from nemo_rl.models.policy.workers.base import PolicyWorker, WorkerSettings
from nemo_rl.models.policy.workers.costs import PassCosts, pass_costs
from nemo_rl.models.policy.workers.update_recorder import RankUpdate, UpdateRecorder
from nemo_rl.models.training.finite import ANOTHER_COPY, require_finite
from nemo_rl.optimizations.process_tuning import keep_freed_memory
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted
from nemo_rl.utils.seed import derive_seed, set_seed


class PolicyRank(PolicyWorker):
    """The worker of one rank, with its process group and backend."""

    def __init__(self, config: PolicyConfig, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.threads())
        transformers_logging.disable_progress_bar()
        device = device_for(settings.uses_gpu)
        torch_device = device.activate()
        backend_class = import_dotted(
            settings.backend,
            ConfigError,
            f"rank_class={settings.backend!r}",
            "Name a PolicyBackend by its dotted path.",
        )
        # With a device, each of Megatron Core's groups would be split from the group of all ranks, and the transfers
        # between its pipeline stages would wait for each other.
        binds_device = config.backend_key != "megatron_cfg"
        with start_phase("process group"):
            init_process_group(device, settings.collective_timeout_s, binds_device=binds_device)
        layout, rank = settings.layout, dist.get_rank()
        with start_phase("model"):
            backend = backend_class(
                config,
                torch_device,
                layout,
                init_optimizer=settings.init_optimizer,
                init_reference_model=settings.init_reference_model,
                seed=settings.seed,
            )
            require_finite(backend.weights_here(), f"the model {config.model_name}", ANOTHER_COPY)
        set_seed(derive_seed(settings.seed, "policy", *layout.random_path(rank)))
        super().__init__(backend, config, gives_scores=rank in layout.result_ranks)
        self._config = config
        if torch_device.type == "cpu" and is_on("host_allocator", settings.optimizations):
            keep_freed_memory()

    def record_updates(self, *, of_modules: bool) -> None:
        """Record the updates from now on, until `take_updates`; see `UpdateRecorder`."""
        self._stop_recorder()
        self.recorder = UpdateRecorder(self.backend, of_modules=of_modules, gives_scores=self._gives_scores)

    def take_updates(self) -> list[RankUpdate]:
        """Return what was recorded, and stop recording."""
        recorder = self._stop_recorder()
        return [] if recorder is None else recorder.take()

    def _stop_recorder(self) -> UpdateRecorder | None:
        """Return the recorder, which sees no further update; None if there is none."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.stop_watching()
        return recorder

    def describe_passes(self) -> PassCosts:
        """Return what passes over rows cost."""
        return pass_costs(self._config, self.backend.device)
