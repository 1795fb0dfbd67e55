"""Give a server new weights through files: each group of tensors is written as it arrives, the server reads them all.

Files are SGLang's most portable update: they need no shared process group and no GPU of the sender. The folder must be
visible to the server; it holds one copy of the weights and is emptied after each update.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from nemo_rl.models.huggingface.tensor_files import model_folder, weight_files


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
        tied = AutoConfig.from_pretrained(source).get_text_config().tie_word_embeddings
        self._expected = {name for file in weight_files(source) for name in _names(file)}
        self._expected -= {"lm_head.weight"} if tied else set()
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
        """Tensors of the model's checkpoint that did not come."""
        return sorted(self._expected - self._received)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as content:
        names: list[str] = list(content.keys())
    return names
