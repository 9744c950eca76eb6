"""Each name of TensorFlow's pages is here, or refused with advice; the page says so."""

import json

from tests.facade import seeds
from tests.fresh import run_forked, run_fresh

CODE = """
import json
from tests.facade import names, seeds
missing = [f"{one.place} {one.name}" for one in names.listed() if one.is_missing]
print(json.dumps([missing, seeds.written()]))
"""


def test_names_of_tensorflow_are_here_or_refused_with_advice():
    missing, page = found()
    said = "add it to kerasdist, or to the table of kerasdist/core/earlier_names.py"
    assert missing == [], said
    assert seeds.PAGE.read_text(encoding="utf-8") == page, "run python -m tests.facade.seeds"


def found():
    return json.loads(run_forked(CODE, "tensorflow").splitlines()[-1])


def test_replicas_are_the_blocks_that_tensorflow_takes():
    code = """
import itertools
import numpy as np
from tensorflow.python.tpu import device_assignment as theirs
from kerasdist.core.partitions import DeviceAssignment, Topology
count = 0
for mesh in ((4, 4, 1, 1), (2, 2, 2, 2), (4, 2, 1, 2)):
    places = np.reshape(list(np.ndindex(mesh)), (1, -1, 4))
    own, other = (each(None, mesh, places) for each in (Topology, theirs.Topology))
    for shape in itertools.product((1, 2), repeat=4):
        if np.all(np.array(shape) <= mesh):
            replicas = int(np.prod(np.array(mesh) // shape))
            built = DeviceAssignment.build(own, shape, None, replicas).core_assignment
            mode = theirs.DeviceOrderMode.MESH
            expected = theirs.DeviceAssignment.build(other, shape, None, replicas, mode)
            assert np.array_equal(built, expected.core_assignment), (mesh, shape)
            count += 1
print(count)
"""
    assert int(run_forked(code, "tensorflow").splitlines()[-1]) == 28


def test_replicas_of_a_slice_of_16_chips_are_its_blocks():
    """CPU devices stand in for 4 x 4 chips, of which each replica has a block of 2 x 2."""
    code = """
import keras, numpy as np, kerasdist as kd
topology = kd.tpu.initialize_tpu_system()
assert topology.mesh_shape.tolist() == [4, 4, 1, 1]
assert topology.device_coordinates.shape == (1, 16, 4)
assignment = kd.tpu.DeviceAssignment.build(topology, [2, 2, 1, 1], num_replicas=4)
resolver = kd.cluster_resolver.TPUClusterResolver.connect(tpu="local")
strategy = kd.TPUStrategy(resolver, assignment, experimental_spmd_xla_partitioning=True)
assert strategy.num_replicas_in_sync == 4
numbers = [assignment.tpu_ordinal(r, c) for r in range(4) for c in range(4)]
assert list(strategy.extended.worker_devices) == [f"cpu:{number}" for number in numbers]
x = np.arange(32, dtype="float32").reshape(8, 4)
@kd.function
def step(rows):
    halves = strategy.experimental_split_to_logical_devices(rows, [2, 2])
    return keras.ops.sum(strategy.experimental_replicate_to_logical_devices(halves * 2.0))
[batch] = strategy.experimental_distribute_dataset([x])
parts = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
assert [float(part) for part in parts] == [2 * x[2 * i : 2 * i + 2].sum() for i in range(4)]
print("equal")
"""
    environment = {"KERAS_BACKEND": "jax", "KERASDIST_CPU_DEVICES": "16"}
    assert run_fresh(code, **environment).splitlines()[-1] == "equal"
