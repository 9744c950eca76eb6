"""Keras's data adapters and ours: what they yield, and what goes on without a part of Keras."""

import json
import zipfile

import keras
import numpy as np
import pytest

from kerasdist import keras_compat
from kerasdist.callbacks import ModelCheckpoint
from kerasdist.core.internals import internals_of
from kerasdist.errors import VersionError
from kerasdist.input.fit_adapter import WrappedAdapter, whole
from kerasdist.keras_compat import internals
from tests.fresh import run_forked

TABLE = internals_of(internals)
OF_DATA = [
    name
    for name, one in TABLE.items()
    if any(part in next(iter(one.spellings)) for part in ("data_adapters", "saving_lib", "data."))
]


@pytest.fixture
def without(monkeypatch):
    """Lets Keras have lost a part."""

    def lost(internal):
        monkeypatch.setitem(vars(internal), "path", None)
        for name in ("place", "value"):
            monkeypatch.delitem(vars(internal), name, raising=False)
        monkeypatch.setattr(type(internal), "is_gone", lambda one: one is internal)

    return lost


def test_there_are_such_parts():
    assert {"ARRAYS", "SAVE_STATE", "FLAT_STRUCTURE", "GET_DATA_ADAPTER"} <= {*OF_DATA}


@pytest.mark.parametrize("name", OF_DATA)
def test_this_keras_has(name):
    assert not TABLE[name].is_gone()


# The sources that Keras tells apart, and its own functions that do.
KINDS = """
import json
import grain, keras, numpy as np, scipy.sparse, tensorflow as tf, torch
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils as utils
from kerasdist import keras_compat
from kerasdist.keras_compat import data

rows = np.arange(6.0).reshape(3, 2)
pipeline = tf.data.Dataset.from_tensor_slices(rows).batch(2)
shared = tf.distribute.OneDeviceStrategy("/cpu:0")
sources = {
    "array": rows, "list": [rows], "tensor": torch.ones(2), "none": None,
    "tf.data": pipeline,
    "tf.distribute": shared.experimental_distribute_dataset(pipeline),
    "of a function": shared.distribute_datasets_from_function(lambda _: pipeline),
    "loader": torch.utils.data.DataLoader(torch.ones(2, 1)),
    "map": grain.MapDataset.source([1, 2]),
    "iter": grain.MapDataset.source([1, 2]).to_iter_dataset(),
    "grain's loader": grain.DataLoader(
        data_source=[1, 2], sampler=grain.samplers.IndexSampler(2, shuffle=False, num_epochs=1)
    ),
    "scipy": scipy.sparse.csr_matrix(rows), "scipy's array": scipy.sparse.csr_array(rows),
    "tf sparse": tf.sparse.from_dense(rows), "ragged": tf.ragged.constant([[1], [2, 3]]),
}
sparse = utils.is_scipy_sparse, utils.is_tensorflow_sparse, utils.is_jax_sparse
found = {}
for name, one in sources.items():
    ours = [data.is_tf_dataset(one), data.is_torch_dataloader(one), data.is_grain_dataset(one)]
    theirs = [
        data_adapters.is_tf_dataset(one),
        data_adapters.is_torch_dataloader(one),
        data_adapters.is_grain_dataset(one),
    ]
    ours.append(data._is_sparse(one))
    theirs.append(any(kind(one) for kind in sparse))
    found[name] = [ours, theirs]
print(json.dumps(found))
"""


def test_sources_are_told_apart_as_by_keras():
    found = json.loads(run_forked(KINDS, "jax").splitlines()[-1])
    assert all(ours == theirs for ours, theirs in found.values()), found
    columns = zip(*(ours for ours, _ in found.values()), strict=True)
    assert [sum(column) for column in columns] == [3, 1, 3, 3]


# What a worker takes of arrays, where it takes all rows, and every second one.
ROWS = """
import json
import keras, numpy as np, pandas
from kerasdist import keras_compat

backend = keras.backend.backend()
x = np.arange(22.0).reshape(11, 2)
table = pandas.DataFrame(x, columns=["a", "b"])
data = {"x": x, "tensor": keras.ops.convert_to_tensor(x), "table": table}, x[:, 0]

def of_keras(adapter):
    if backend == "tensorflow":
        return list(adapter.get_tf_dataset())
    return list(adapter.get_jax_iterator() if backend == "jax" else adapter.get_torch_dataloader())

def of_rows(adapter, step):
    chosen = lambda numbers: numbers[::step]
    if backend == "tensorflow":
        return list(keras_compat.tensorflow_rows(adapter, chosen, lambda rows, numbers: rows))
    rows = keras_compat.jax_rows if backend == "jax" else keras_compat.torch_rows
    return [batch for batch, total in rows(adapter, chosen)]

def values(batches, step=1):
    numpy = lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf))[::step]
    return [[numpy(leaf) for leaf in keras.tree.flatten(batch)] for batch in batches]

checked = 0
for shuffle in (False, True, "batch"):
    for epochs in (0, 2):
        for step in (1, 2):
            read = []
            for take in (of_keras, lambda adapter: of_rows(adapter, step)):
                keras.utils.set_random_seed(5)
                adapter = keras_compat.get_data_adapter(*data, batch_size=4, shuffle=shuffle)
                assert keras_compat.takes_rows(adapter)
                for _ in range(epochs):
                    adapter.on_epoch_end()
                read.append(take(adapter))
            whole, own = values(read[0], step), values(read[1])
            assert len(whole) == len(own) == 3
            for one, other in zip(whole, own, strict=True):
                for expected, leaf in zip(one, other, strict=True):
                    assert expected.dtype == leaf.dtype, (expected.dtype, leaf.dtype)
                    np.testing.assert_array_equal(expected, leaf)
                    checked += 1
print(json.dumps(checked))
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_own_rows_are_those_of_whole_batches(backend):
    assert json.loads(run_forked(ROWS, backend).splitlines()[-1]) == 12 * 3 * 4


def arrays():
    return keras_compat.get_data_adapter(np.arange(6.0), batch_size=2, shuffle=True)


@pytest.mark.parametrize("name", ["ARRAYS", "SLICEABLE", "EPOCHS_READ"])
def test_without_a_part_whole_batches_are_read(without, name):
    adapter = arrays()
    assert keras_compat.takes_rows(adapter)
    without(TABLE[name])
    assert keras_compat.is_array_adapter(adapter)
    assert not keras_compat.takes_rows(adapter)


def test_an_unknown_order_is_not_backed_up(without):
    adapter, plain = arrays(), keras_compat.get_data_adapter(np.arange(6.0), batch_size=2)
    vars(adapter).pop("_epoch", None)
    without(internals.EPOCHS_READ)
    with pytest.raises(VersionError, match="needs for BackupAndRestore with data"):
        keras_compat.epochs_read(adapter)
    vars(plain).pop("_epoch", None)
    assert keras_compat.epochs_read(plain) is None  # its order is known


class Wrapped(WrappedAdapter):
    pass


def test_keras_takes_our_adapters():
    inner = arrays()
    adapter = Wrapped(inner)
    assert keras_compat.get_data_adapter(adapter) is adapter
    assert isinstance(adapter, Wrapped)
    assert keras_compat.is_data_adapter(adapter)
    assert keras_compat.is_data_adapter(inner)
    assert not isinstance(inner, WrappedAdapter)
    assert not keras_compat.is_data_adapter(np.arange(3))
    assert type(Wrapped(inner)) is type(adapter)
    assert adapter.num_batches == 3
    assert WrappedAdapter.reads_arrays(Wrapped(adapter))


def test_a_wrapper_asks_for_as_many_batches_as_it_is_asked_for():
    class Inner:
        def get_jax_iterator(self, **given):
            return [given]

    adapter = Wrapped(Wrapped(Inner()))
    assert list(adapter.get_jax_iterator()) == [{}]  # as all versions of Keras take it
    assert list(adapter.get_jax_iterator(super_batch=3)) == [{"super_batch": 3}]


class Batches:
    def __init__(self):
        self.begun = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.begun += 1
        return iter([np.full((2, 1), number) for number in range(3)])


def test_batches_of_a_list_are_read_anew_each_epoch():
    from kerasdist.input.distributed import DividedDataset
    from kerasdist.input.options import InputOptions

    source = Batches()
    adapter = whole(DividedDataset(source, None, InputOptions()))
    assert keras_compat.get_data_adapter(adapter) is adapter
    assert adapter.num_batches == 3
    for _ in range(2):
        read = [int(x[0, 0]) for (x,) in adapter.get_numpy_iterator()]
        assert read == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy
@pytest.mark.parametrize("name", ["SAVE_STATE", "WEIGHTS_FILE"])
def test_a_checkpoint_is_written_at_once_where_keras_has_no_copies(without, name, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    path = tmp_path / "m.keras"
    without(TABLE[name])
    with pytest.warns(UserWarning, match="saves at once.*Expected Keras to have"):
        checkpoint = ModelCheckpoint(path, save="async")
    checkpoint.set_model(model)
    checkpoint.on_epoch_end(0, {})
    with zipfile.ZipFile(path) as archive:
        assert "model.weights.h5" in archive.namelist()
    checkpoint.on_train_end()


def test_the_metric_of_compile_is_known():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    known = [keras_compat.is_compile_metrics(one) for one in model.metrics]
    assert known.count(True) == 1
    assert not keras_compat.is_compile_metrics(keras.metrics.Mean())
