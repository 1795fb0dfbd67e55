"""Give a server new weights through files: each group of tensors is written as it arrives, the server reads them all.

Files are SGLang's most portable update: they need no shared process group and no GPU of the sender. The folder must be
visible to the server; it holds one copy of the weights and is emptied after each update.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.huggingface.tensor_files import model_folder


class WeightFolder:
    """The tensors of one update as files.

    Args:
        model_name: local folder or hub id of the model, whose description the folder gets too.
        parent: folder in which the files are written; None: the folder of temporary files.
    """

    def __init__(self, model_name: str, parent: str | None) -> None:
        source = model_folder(model_name)
        self.path = Path(tempfile.mkdtemp(prefix="nemo-rl-weights-", dir=parent))
        self.path.chmod(0o755)  # the server may belong to another user
        for file in source.glob("*.json"):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copy(file, self.path / file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
        self._expected = {name for name, _ in in_checkpoint(model, model.named_parameters())}
        self._received: set[str] = set()
        self._num_files = 0

    def clear(self) -> None:
        """Remove all tensors."""
        for file in self.path.glob("*.safetensors"):
            file.unlink()
        self._received, self._num_files = set(), 0

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write tensors."""
        if not tensors:
            return
        self._num_files += 1
        file = self.path / f"model-{self._num_files:05d}.safetensors"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors}, file)
        file.chmod(0o644)
        self._received |= {name for name, _ in tensors}

    @property
    def missing(self) -> list[str]:
        """Parameters of the model, by their names in checkpoints, that did not come."""
        return sorted(self._expected - self._received)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
