"""What XLA makes of `fit` for accelerators that are not here. All programs: `make ahead-of-time`.

A state that is not donated takes its memory twice; a collective too many costs each step of a real
job, and no test on CPU devices shows it.
"""

import functools

import pytest

from tests.ahead_of_time.processes import compiled
from tests.environment import everything

EVERYTHING = everything()
SECONDS = 1500 if EVERYTHING else 600

LAYERS, UNITS = 12, 1024  # of the program `deep`
ONE_SUM = {"all-reduce": 1}
# Per BatchNormalization one for the moments and one for their gradients.
NORMALIZED = {"all-gather": 2, "all-reduce": 3}
# By program: the collectives of one step; and where a target has others.
BOTH: dict[str, dict[str, int]] = {
    "mlp": ONE_SUM,
    "mlp, uneven batch": ONE_SUM,
    "mlp, clipnorm": ONE_SUM,
    "mlp, 2 logical devices": {"all-reduce": 5, "all-gather": 3, "reduce-scatter": 2},
    # Gradients are scattered, and weights gathered: the new ones, or where layers use them.
    "mlp, optimizer sharded": {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1},
    "mlp, all sharded": {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1},
    "convolutions with BatchNormalization": NORMALIZED,
    "transformer in bfloat16": {"all-reduce": 2},  # float32 and bfloat16
    "LSTM": ONE_SUM,
}
ON_TPU = {
    "mlp, 2 logical devices": {"all-reduce": 5, "all-gather": 10, "reduce-scatter": 2},
    "mlp, optimizer sharded": {"reduce-scatter": 1, "all-gather": 3, "all-reduce": 1},
    "mlp, all sharded": {"reduce-scatter": 1, "all-gather": 3, "all-reduce": 1},
}
EXPECTED = {"v5e:2x2": BOTH | ON_TPU, "8xh100": BOTH}
# A batch that is divided unevenly, and variables that are divided; for GPUs: `test_golden`.
DEEP = "deep, all sharded"
OFFLOADED = ("deep", "deep, offloaded")  # described GPUs have no memory of a host
SELECTED = {"v5e:2x2": ["mlp, uneven batch", "mlp, all sharded"]}
DEVICES = {"v5e:2x2": 4, "8xh100": 8}
GATHERED = {"v5e:2x2": 0.5, "8xh100": 1}  # a TPU multiplies in bfloat16, and gathers that
CHOSEN = {one: list(EXPECTED[one]) for one in EXPECTED} if EVERYTHING else SELECTED


@functools.cache
def programs(target):
    names = [*CHOSEN.get(target, []), DEEP, *(OFFLOADED if target == "v5e:2x2" else ())]
    return compiled(target, names, SECONDS)


@pytest.mark.timeout(SECONDS + 20)
def test_a_slice_has_a_topology_of_which_replicas_are_blocks():
    """On chips of one core each, two cores of a replica are those of neighbours."""
    found = programs("v5e:2x2")["topology"]
    assert found["topology"] == "Topology(mesh_shape=[2, 2, 1, 1], num_tasks=1)"
    rows = [[[x, y, 0, 0] for x in range(2)] for y in range(2)]
    assert found["blocks"] == rows


@pytest.mark.timeout(SECONDS + 20)
def test_what_the_host_holds_leaves_the_device():
    """Optimizer variables are arguments in the host's memory, and few are copied at a time."""
    whole, offloaded = (programs("v5e:2x2")[name] for name in OFFLOADED)
    slots = 2 * 4 * LAYERS * UNITS**2
    assert offloaded["on the host"] == [slots, slots]
    assert whole["on the host"] == [0, 0]
    assert whole["held"]["optimizer"] == offloaded["held"]["optimizer"] + slots
    before, now = (sum(one["held"].values()) + one["temporary"] for one in (whole, offloaded))
    # XLA keeps gradients until the update, which it else makes as they come. If it copied all
    # at once, the device would have as much as before.
    assert now < before - slots / 10
    assert offloaded["donated"] == offloaded["arrays"]


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target in CHOSEN for name in CHOSEN[target]]
)
def test_state_is_donated_and_collectives_are_few(target, name):
    found = programs(target)[name]
    assert found["donated"] == found["arrays"] > 0
    assert found["collectives"] == EXPECTED[target][name]


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("target", DEVICES)
def test_few_weights_are_whole_at_a_time(target):
    """Of twelve layers: they are gathered for each pass, and gradients scattered one by one."""
    found, weight = programs(target)[DEEP], 4 * UNITS**2
    shards_of_gradients = LAYERS / DEVICES[target]
    assert found["temporary"] / weight < shards_of_gradients + 4
    gathered = sum(size for kind, size, _ in found["sent"] if kind == "all-gather")
    # Not again: of the last layer, which comes next going backward; the first needs none there.
    assert gathered == (2 * LAYERS - 2) * weight * GATHERED[target]
