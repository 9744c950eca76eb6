"""The functions and classes of JAX that kerasdist needs and that are not public, or may move."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

CREATE_DEVICE_MESH = Internal(
    {"jax.experimental.mesh_utils:create_device_mesh": EVERY_VERSION},
    feature="a replica of several chips of a TPU slice as neighbours in its torus",
    without="a replica's chips are those whose numbers follow each other",
)

GET_TOPOLOGY = Internal(
    {"jax.experimental.topologies:get_topology_desc": EVERY_VERSION},
    feature="a plan for accelerators that this machine does not have (kerasdist plan)",
    without="refused",
)
