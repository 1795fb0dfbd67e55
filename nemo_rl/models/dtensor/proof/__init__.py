"""Numeric proofs of meshes, before Ray starts: `mesh_proof` asks, `small` says of what, `numbers` computes both sides.

`children` runs them in forked processes, `known` remembers what was proven.
"""

from nemo_rl.models.dtensor.proof.mesh_proof import prove_mesh

__all__ = ["prove_mesh"]
