"""Sources of data: each gives the same batches, in the same order, under a strategy."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.lazy import grain, jnp, keras, tf, torch
from tests.conformance.models import compiled, dataset_of, dense, regression, weights_for
from tests.conformance.registry import REPLICAS, case

N, BATCH = 11, 4
X, Y = regression(N)


@case("data")
def pandas(lab):
    """NumPy, shuffled as by plain Keras, without `batch_size`, float64, integers; pandas."""
    import pandas as pd

    more, targets = regression(40)
    frame, series = pd.DataFrame(X, columns=list("abcd")), pd.Series(Y[:, 0])
    lab.same(
        dense,
        fit(X, Y, batch_size=BATCH, shuffle=True, epochs=3),
        *(fit(more, targets), evaluate(more, targets), predict(more)),
        fit(X.astype("float64"), Y.astype("float64"), batch_size=BATCH),
        fit((X * 3).astype("int64"), Y, batch_size=BATCH),
        fit(frame, series, batch_size=BATCH, shuffle=False),
        predict(frame, batch_size=BATCH),
    )


@case("data", like="data.tf_data")
def tf_data_of_other_kinds(lab):
    """`tf.data` with batches of unknown size, endless with `steps_per_epoch`, of dicts."""
    endless = {"epochs": 2, "steps_per_epoch": 4, "validation_steps": 2}
    lab.same(
        dense,
        *(fit(dataset(unknown=True)), evaluate(dataset(unknown=True))),
        fit(dataset(repeat=True), validation_data=dataset(repeat=True), **endless),
    )

    def make():
        data = ({"left": X[:, :2], "right": X[:, 2:]}, Y)
        return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)

    def build():
        inputs = {"left": keras.Input((2,), name="left"), "right": keras.Input((2,), name="right")}
        merged = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
        model = keras.Model(inputs, keras.layers.Dense(1)(merged))
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    lab.same(build, fit(make))


@case("data")
def tensors_of_the_backends(lab):
    """TensorFlow's, JAX's and PyTorch's tensors, on every backend."""
    actions = []
    makers = {"tensorflow": tf.constant, "jax": jnp.asarray, "torch": torch.tensor}
    for backend, make in makers.items():
        x, y, weights = map(make, (X, Y, weights_for(N)))
        actions.append(fit(x, y, batch_size=BATCH, shuffle=False, sample_weight=weights))
        if backend == lab.backend:
            actions += [evaluate(x, y, batch_size=BATCH), predict(x, batch_size=BATCH)]
    lab.same(dense, *actions)


def dataset(n=N, batch=BATCH, unknown=False, weights=False, repeat=False):
    def make():
        x, y = regression(n)
        source = tf.data.Dataset.from_tensor_slices((x, y, weights_for(n)) if weights else (x, y))
        source = source.batch(batch)
        if unknown:

            def lose_shape(x, y):
                x, y = tf.numpy_function(lambda a, b: (a, b), [x, y], [tf.float32, tf.float32])
                x.set_shape((None, 4))
                y.set_shape((None, 1))
                return x, y

            source = source.map(lose_shape)
        return source.repeat() if repeat else source

    return make


@case("data")
def tf_data(lab):
    """`tf.data.Dataset` of (x, y), and of (x, y, sample_weight)."""
    lab.same(
        dense,
        *(fit(dataset(), epochs=2), evaluate(dataset()), predict(dataset())),
        *(fit(dataset(weights=True)), evaluate(dataset(weights=True))),
    )


def loader(**options):
    def make():
        generator = torch.Generator().manual_seed(5)
        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        return torch.utils.data.DataLoader(data, batch_size=BATCH, generator=generator, **options)

    return make


@case("data")
def torch_data_loader(lab):
    """torch's `DataLoader`; a shuffling one, with `drop_last`."""
    shuffling = loader(shuffle=True, drop_last=True)
    lab.same(
        dense,
        *(fit(loader(), epochs=2), evaluate(loader()), predict(loader())),
        fit(shuffling, epochs=2, validation_data=loader()),
    )


def py_dataset(*sizes, **options):
    def batch(index):
        return *regression(sizes[index], seed=index), weights_for(sizes[index])

    return lambda: dataset_of(batch, len(sizes), **options)


@case("data")
def py_dataset_uneven(lab):
    """`PyDataset` with batches of very different sizes; with worker threads, shuffled."""
    uneven = py_dataset(1, 6, 5, 2)
    threads = py_dataset(4, 4, 4, 3, workers=2, max_queue_size=3)
    lab.same(
        dense,
        *(fit(uneven, shuffle=False, epochs=2), evaluate(uneven), predict(uneven)),
        fit(threads, shuffle=True, epochs=2),
    )


@case("data", replicas=REPLICAS)
def generator(lab):
    """A Python generator, with `steps_per_epoch`, and of inputs alone, to predict."""

    def make():
        while True:
            for index, size in enumerate((3, 6, 1)):
                yield regression(size, seed=index)

    lab.same(
        dense,
        fit(make, epochs=2, steps_per_epoch=4, validation_data=make, validation_steps=2),
        evaluate(make, steps=3),
        predict(lambda: ((x,) for x, _ in make()), steps=6),
    )


@case("data", backends=("jax", "torch"))
def generator_of_listed_weights(lab):
    """Sample weights that are lists of numbers, of a generator and a `PyDataset`."""
    # Plain Keras on TensorFlow takes no number of Python's from a generator.

    def batches():
        for index, size in enumerate((4, 6, 3)):
            yield *regression(size, seed=index), [0.5 * row for row in range(size)]

    listed = dataset_of(lambda index: list(batches())[index], 3)
    lab.same(dense, fit(batches, epochs=1, shuffle=False), fit(listed), evaluate(batches))


@case("data", like="data.py_dataset_uneven")
def grain_and_processes(lab):
    """A `grain` dataset and loader; a `PyDataset` with worker processes."""
    from tests.conformance.datasets import Processes

    def make():
        return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(BATCH)

    def make_loader():
        sampler = grain.samplers.SequentialSampler(len(X), grain.sharding.NoSharding())
        return grain.DataLoader(
            data_source=list(zip(X, Y, strict=True)),
            sampler=sampler,
            operations=[grain.transforms.Batch(BATCH)],
        )

    def processes():
        return Processes(workers=2, use_multiprocessing=True)

    actions = [fit(make, epochs=2), evaluate(make), fit(make_loader), fit(processes, shuffle=False)]
    lab.same(dense, *actions, length_unknown=True)


@case("validation")
def validation(lab):
    """`validation_data` (weights, other kinds), `validation_batch_size`, `_freq`, `_split`."""
    given = (*regression(7, seed=5), weights_for(7))
    options = {"validation_data": given, "validation_batch_size": 3, "validation_freq": 2}
    others = [fit(X, Y, batch_size=BATCH, validation_data=one) for one in (dataset(7, 3), loader())]
    lab.same(
        dense,
        fit(X, Y, batch_size=BATCH, epochs=4, **options),
        fit(X, Y, batch_size=BATCH, epochs=2, validation_split=0.3),
        *others,
    )


@case("data")
def sparse_inputs_with_adam(lab):
    """Sparse tensors as a layer's inputs, with an optimizer that squares gradients."""
    import scipy.sparse as sparse

    def build(**options):
        # Plain Keras on torch has no sparse tensors and converts SciPy's matrices to dense arrays.
        image = keras.Input(X.shape[1:], sparse=lab.backend != "torch")
        hidden = keras.layers.Dense(4, activation="tanh")(image)
        model = keras.Model(image, keras.layers.Dense(1)(hidden))
        return compiled(model, keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)

    rows = sparse.csr_matrix(np.where(X > 0, X, 0).astype("float32"))
    train = fit(rows, Y, batch_size=BATCH, epochs=2, shuffle=False)
    lab.same(build, train)
    if lab.backend == "tensorflow":
        lab.same(lambda: build(run_eagerly=True), train)
