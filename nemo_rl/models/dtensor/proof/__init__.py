"""Numeric proofs of meshes, run before Ray starts.

`mesh_proof` runs a proof, `small` builds the small model and mesh for it, and `numbers` computes both sides.
`children` runs the computations in forked processes, `mesh_proof` also stores which meshes were proven.
"""

from nemo_rl.models.dtensor.proof.mesh_proof import prove_mesh

__all__ = ["prove_mesh"]
