"""Classify a table with numbers and categories, where one class is rare.

The data are scikit-learn's breast cancer measurements: 28 numbers for a tumour, and two more that
are cut into five bins each and used as categories. The input is a dictionary with a tensor for each
kind. To make one class rare, the script leaves out two thirds of the malignant cases.
`class_weight` compensates for this. AUC is measured, because accuracy hides errors in a rare class.

    KERAS_BACKEND=torch python examples/tabular_mixed_features.py
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import kerasdist as kd

BATCH_SIZE = 50
BINS = 5


def load_data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the inputs by name, and 1 for each malignant tumour."""
    table = load_breast_cancer()
    malignant = table.target == 0
    malignant_rows = np.flatnonzero(malignant)
    rows = np.sort(np.concatenate([np.flatnonzero(~malignant), malignant_rows[::3]]))
    numbers, y = table.data[rows].astype("float32"), malignant[rows].astype("float32")
    edges = np.quantile(numbers[:, :2], np.arange(1, BINS) / BINS, axis=0)
    bins = [np.digitize(numbers[:, column], edges[:, column]) for column in (0, 1)]
    return {
        "radius": bins[0].astype("int32")[:, np.newaxis],
        "texture": bins[1].astype("int32")[:, np.newaxis],
        "numbers": numbers[:, 2:],
    }, y


def build_model(numbers: np.ndarray) -> keras.Model:
    """Return the compiled model; it learns the scale of its inputs from `numbers`."""
    inputs = {
        "radius": keras.Input((1,), dtype="int32", name="radius"),
        "texture": keras.Input((1,), dtype="int32", name="texture"),
        "numbers": keras.Input((numbers.shape[1],), name="numbers"),
    }
    normalization = layers.Normalization()
    normalization.adapt(numbers)
    features = [
        layers.Flatten()(layers.Embedding(BINS, 4)(inputs["radius"])),
        layers.Flatten()(layers.Embedding(BINS, 4)(inputs["texture"])),
        normalization(inputs["numbers"]),
    ]
    x = layers.Dense(32, activation="relu")(layers.Concatenate()(features))
    x = layers.Dropout(0.2)(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc"), keras.metrics.Recall(name="recall")],
    )
    return model


def draw(path: str, chances: np.ndarray, y: np.ndarray) -> None:
    """Draw what the model says of benign and of malignant tumours."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.hist([chances[y == 0], chances[y == 1]], bins=20, label=["benign", "malignant"], log=True)
    plt.xlabel("predicted chance that it is malignant")
    plt.ylabel("tumours held out")
    plt.legend()
    plt.savefig(path)


def main() -> None:
    """Train, and print the AUC and the recall on the rows held out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    inputs, y = load_data()
    rows = np.arange(len(y))
    train, test = train_test_split(rows, test_size=0.3, random_state=0, stratify=y)
    x_train = {name: values[train] for name, values in inputs.items()}
    x_test = {name: values[test] for name, values in inputs.items()}

    with strategy.scope():
        model = build_model(x_train["numbers"])
    rare = float(np.mean(y[train]))
    model.fit(
        x_train,
        y[train],
        batch_size=BATCH_SIZE,  # the last batch of an epoch has fewer rows, and counts as much less
        epochs=options.epochs,
        class_weight={0: 0.5 / (1 - rare), 1: 0.5 / rare},
        verbose=2,
    )
    if options.figure:
        draw(options.figure, model.predict(x_test, verbose=0)[:, 0], y[test])
    figures = model.evaluate(x_test, y[test], batch_size=BATCH_SIZE, verbose=0, return_dict=True)
    print(
        f"{strategy.num_replicas_in_sync} replicas: AUC {figures['auc']:.4f}, "
        f"recall {figures['recall']:.4f}, with {rare:.0%} malignant"
    )


if __name__ == "__main__":
    main()
