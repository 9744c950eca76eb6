"""The same batches from every kind of source that can be distributed."""

import numpy as np

from tests.conformance.lazy import grain, kd, keras, tf, torch

X = np.arange(20, dtype="float32").reshape(10, 2)
Y = np.arange(10, dtype="int32")
SIZE = 4


def pairs():
    return [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, 10, SIZE)]


def Sequence(batches=None):
    """A PyDataset, made where Keras is at hand."""
    batches = batches or pairs()

    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    return Pairs()


def tf_dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


def dataloader():
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(rows, batch_size=SIZE)


def grain_dataset():
    rows = [(X[i], Y[i]) for i in range(10)]
    return grain.MapDataset.source(rows).batch(SIZE)


class Again:
    def __iter__(self):
        return iter(pairs())


SOURCES = {
    "list": (pairs, 3),
    "tuple": (lambda: tuple(pairs()), 3),
    "iterable": (Again, None),
    "PyDataset": (Sequence, 3),
    "tf_data": (tf_dataset, 3),
    "DataLoader": (dataloader, 3),
    "grain": (grain_dataset, 3),
    "rows": (lambda: kd.get_strategy().experimental_make_numpy_dataset((X, Y)).batch(SIZE), 3),
}
