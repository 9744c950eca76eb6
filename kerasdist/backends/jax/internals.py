"""JAX's functions that kerasdist calls although they are not public, or may move."""

from __future__ import annotations

from kerasdist.core.internals import internal

CREATE_DEVICE_MESH = internal(
    "jax.experimental.mesh_utils:create_device_mesh",
    "replicas whose TPU chips are neighbours in the torus of the slice",
    "a replica gets chips with consecutive numbers",
)

GET_TOPOLOGY = internal(
    "jax.experimental.topologies:get_topology_desc",
    "a plan for accelerators that this machine does not have (kerasdist plan)",
)
