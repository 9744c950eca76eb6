"""Tripwires of the seam to Keras's data adapters, and to ``tf.data``: see test_keras_compat.py."""

import json

import pytest

from tests.fresh import run_forked

BACKENDS = ["tensorflow", "jax", "torch"]

PROBE = """
import json
import keras
import numpy as np
from kerasdist import keras_compat

backend = keras_compat.backend_name()
x = np.arange(22, dtype="float32").reshape(11, 2)
data = {"x": x, "y": {"a": x[:, :1], "b": x[:, 1]}, "sample_weight": np.ones(11, "float32")}

def numpy(tree):
    leaves = map(keras.ops.convert_to_numpy, keras.tree.flatten(tree))
    return [np.asarray(leaf).tolist() for leaf in leaves]

def half(numbers):
    return numbers[: (len(numbers) if backend != "tensorflow" else numbers.shape[0]) // 2]

def batches(adapter, chosen):
    if backend == "jax":
        return list(keras_compat.jax_rows(adapter, chosen))
    if backend == "torch":
        return list(keras_compat.torch_rows(adapter, chosen))
    import tensorflow as tf
    made = lambda rows, numbers: (rows, tf.shape(numbers)[0])
    dynamic = lambda numbers: numbers[: tf.shape(numbers)[0] // 2] if chosen is half else numbers
    return [(r, int(n)) for r, n in keras_compat.tensorflow_rows(adapter, dynamic, made)]

orders = {}
for shuffle in (False, False, True, "batch"):  # the first one again: imports may draw, too
    adapter = keras_compat.get_data_adapter(**data, batch_size=4, shuffle=shuffle)
    for _ in range(2):  # from Keras 3.16 on the order depends on the number of epochs
        adapter.on_epoch_end()
    whole = {
        "jax": "get_jax_iterator", "torch": "get_torch_dataloader", "tensorflow": "get_tf_dataset"
    }[backend]
    keras.utils.set_random_seed(3)
    kerass = [numpy(one) for one in getattr(adapter, whole)()]
    after = np.random.rand()
    keras.utils.set_random_seed(3)
    ours = [(numpy(rows), total) for rows, total in batches(adapter, lambda numbers: numbers)]
    drawn_alike = np.random.rand() == after
    keras.utils.set_random_seed(3)
    halves = [(numpy(rows), total) for rows, total in batches(adapter, half)]
    orders[str(shuffle)] = [
        [rows for rows, _ in ours] == kerass,
        [total for _, total in ours],
        [[leaf[: total // 2] for leaf in rows] for rows, total in ours]
        == [rows for rows, _ in halves],
        drawn_alike,
        kerass[0][0],
    ]

import scipy.sparse
sparse = keras_compat.get_data_adapter(scipy.sparse.csr_matrix(x), x[:, :1], batch_size=4)
generator = keras_compat.get_data_adapter((one for one in [(x, x)]))
kinds = [
    keras_compat.is_array_adapter(adapter), keras_compat.is_array_adapter(generator),
    keras_compat.has_sparse(adapter), keras_compat.has_sparse(sparse),
]
print(json.dumps({"orders": orders, "kinds": kinds}))
"""

FILES = """
import json, pathlib, tempfile
import tensorflow as tf
from kerasdist import keras_compat

def read(dataset):
    return [one.numpy().decode() for one in dataset]

with tempfile.TemporaryDirectory() as folder:
    paths = [pathlib.Path(folder, f"{number}.txt") for number in range(3)]
    for path in paths:
        path.write_text(path.stem)
    lines = tf.data.TextLineDataset([str(path) for path in paths])
    tables = tf.data.Dataset.range(4)
    said = tf.data.Options()
    said.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    print(json.dumps({
        "parts": [read(keras_compat.every_nth_file(lines, 2, index)[0]) for index in range(2)],
        "few": [keras_compat.every_nth_file(lines, 4, index)[1] for index in range(4)],
        "none": keras_compat.every_nth_file(tables, 2, 0)[1],
        "policies": [keras_compat.auto_shard_policy(one) for one in (
            lines, lines.with_options(said), [1])],
        "kept": keras_compat.every_nth_file(lines.with_options(said), 2, 0)[0]
            .options().experimental_distribute.auto_shard_policy.name,
    }))
"""


@pytest.fixture(scope="module", params=BACKENDS)
def probe(request):
    return json.loads(run_forked(PROBE, request.param).splitlines()[-1])


@pytest.mark.parametrize("shuffle", ["False", "True", "batch"])
def test_chosen_rows_of_arrays_come_in_kerass_order(probe, shuffle):
    rows, totals, parts, draws, first = probe["orders"][shuffle]
    assert rows
    assert totals == [4, 4, 3]
    assert parts
    assert draws
    assert (first == [[0, 1], [2, 3], [4, 5], [6, 7]]) == (shuffle == "False")


def test_kinds_of_adapters_are_told_apart(probe):
    assert probe["kinds"] == [True, False, False, True]


def test_a_pipeline_is_read_by_files():
    found = json.loads(run_forked(FILES, "jax").splitlines()[-1])
    assert found["parts"] == [["0", "2"], ["1"]]
    # A worker beyond the last file does not see that there are too few.
    assert found["few"] == ["it reads fewer files than there are workers"] * 3 + [None]
    assert found["none"] == "it reads no files"
    assert found["policies"] == ["AUTO", "FILE", None]
    assert found["kept"] == "FILE"
