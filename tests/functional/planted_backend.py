"""The library's training backend with a change of one numeric operation, which a file switches on."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.training_backend import DTensorTraining

MODULE = "model.layers.1.mlp"


class PlantedBackend(DTensorBackend):
    """Changes the last bits of the output of one module if the file `plant` exists in a folder."""

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        if (Path(config.training_backend.kwargs["folder"]) / "plant").exists():
            self.model.hf.get_submodule(MODULE).register_forward_hook(another_kernel)


class PlantedTraining(DTensorTraining):
    """See `PlantedBackend`."""

    rank_class = "planted_backend.PlantedBackend"


def another_kernel(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Round as a kernel would that adds in another order."""
    return output * (1 + 1e-6)
