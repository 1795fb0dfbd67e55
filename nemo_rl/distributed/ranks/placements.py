"""Convert whole tensors to DTensors without communication, and back one mesh axis at a time.

This also lets modules compute with the local tensors of their rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def local_slice(whole: Tensor, placement: Placement, mesh: DeviceMesh) -> Tensor:
    """Copy this rank's part of a whole tensor on a mesh with one axis, also on the meta device."""
    if not isinstance(placement, Shard):
        return whole.detach()
    return whole.detach().chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous().clone()


def as_sharded(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """Convert a whole parameter to a DTensor with this rank's part, without communication."""
    local = local_slice(parameter, placement, mesh)
    sharded = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def held_here(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def computing_with(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a block in which tensors replace a module's own parameters of the same names."""
    stored = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(stored)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank of its mesh. The call is collective for DTensors.

    It is gathered on the mesh's device axis by axis, outermost first: FSDP divides the parts of tensor parallelism, so
    FSDP's pieces are joined first. (`full_tensor` does the same for such placements, but always warns.)
    """
    if not isinstance(tensor, DTensor):
        return tensor
    home = tensor.device_mesh.device_type
    gathered: Any = tensor if tensor.device.type == home else tensor.to(home)
    for axis in range(gathered.device_mesh.ndim):
        placements = [Replicate() if index <= axis else placement for index, placement in enumerate(tensor.placements)]
        gathered = gathered.redistribute(placements=placements)
    local: Tensor = gathered.to_local()
    return local
