"""Train on several workers: one script, whatever starts it.

A worker is a process, on this machine or another one, and each worker runs the whole script.
Launchers describe the job to its processes in environment variables, which kerasdist reads. So all
of these commands do the same:

    kerasdist run --workers 2 examples/multi_worker_fit.py                      # this machine
    kerasdist run --hosts gpu1:4,gpu2:4 examples/multi_worker_fit.py            # by ssh
    torchrun --nproc-per-node 2 examples/multi_worker_fit.py                    # any backend
    srun --nodes 2 --ntasks-per-node 4 python examples/multi_worker_fit.py      # Slurm
    TF_CONFIG='{"cluster": ..., "task": ...}' python examples/multi_worker_fit.py
    kubectl apply -f integrations/kubernetes/job.yaml   # with this script in its image

Without a launcher the script trains on the devices of this machine.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import kerasdist as kd


def build_model() -> keras.Model:
    """Return a compiled classifier of digits."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def draw(path: str, images: np.ndarray, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Draw test images with the digits that the model sees in them; mistakes are red."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(4, 9, figsize=(6.4, 4), layout="constrained")
    for place, image, label, seen in zip(axes.flat, images, labels, predicted, strict=False):
        place.imshow(image.reshape(8, 8), cmap="gray_r")
        place.set_title(str(seen), color="black" if seen == label else "red")
        place.axis("off")
    plt.savefig(path)


def main() -> None:
    """Train, evaluate, predict, save, load; print the accuracy of the loaded model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    default = Path(tempfile.gettempdir()) / "kerasdist_digits.keras"
    parser.add_argument("--save-to", type=Path, default=default)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()  # in a job it waits here until all workers have come
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")

    with strategy.scope():
        model = build_model()
    # Every worker has all data, and computes its rows of each batch of 64. The last epoch's
    # figures, and what evaluate and predict return, are of all examples and the same everywhere.
    model.fit(x[:1500], y[:1500], batch_size=64, epochs=options.epochs, verbose=2)
    _, accuracy = model.evaluate(x[1500:], y[1500:], batch_size=64, verbose=0)
    predictions = model.predict(x[1500:], batch_size=64, verbose=0)

    # All workers say it; the chief writes, and the others wait until the file is there.
    model.save(options.save_to)
    with strategy.scope():
        loaded = keras.saving.load_model(options.save_to)
    difference = np.max(np.abs(loaded.predict(x[1500:], verbose=0) - predictions))
    if options.figure:
        draw(options.figure, x[1500:], y[1500:], predictions.argmax(axis=1))
    if strategy.extended.should_checkpoint:  # the chief
        print(f"saved {options.save_to}")
    print(
        f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}, "
        f"difference to the loaded model {difference:.1e}"
    )


if __name__ == "__main__":
    main()
