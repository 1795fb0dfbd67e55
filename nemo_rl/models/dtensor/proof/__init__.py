"""Prove meshes numerically: before Ray starts, a small model must give the same results on the mesh as on one rank.

`mesh_proof` runs a proof and stores which meshes were proven, `small` builds the small model and mesh, `numbers`
computes the results to compare, and `children` runs the computations in forked processes.
"""

from nemo_rl.models.dtensor.proof.mesh_proof import prove_mesh

__all__ = ["prove_mesh"]
