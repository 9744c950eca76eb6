"""The functions and classes of JAX that kerasdist needs and that are not public, or may move."""

from __future__ import annotations

from kerasdist.core.internals import internal

CREATE_DEVICE_MESH = internal(
    "jax.experimental.mesh_utils:create_device_mesh",
    "a replica of several chips of a TPU slice as neighbours in its torus",
    "a replica's chips are those whose numbers follow each other",
)

GET_TOPOLOGY = internal(
    "jax.experimental.topologies:get_topology_desc",
    "a plan for accelerators that this machine does not have (kerasdist plan)",
)
