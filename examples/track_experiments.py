"""Weights & Biases and MLflow in a job: the chief alone logs, offline, and neither is required.

The logs of an epoch are those of the global batch on every worker, so it is enough that one worker
writes them. `kd.callbacks.ChiefOnly` lets a callback act on the chief, and on no other worker. A
tracker that is not installed is left out:

    KERAS_BACKEND=jax kerasdist run --workers 2 examples/track_experiments.py --folder runs
    wandb sync runs/wandb/offline-run-*      # later, where there is a network
    mlflow ui --backend-store-uri runs/mlflow
"""

import argparse
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
from sklearn.datasets import load_digits

import kerasdist as kd

PROJECT = "digits"


class LogToWandb(keras.callbacks.Callback):
    """Logs each epoch to Weights & Biases: without a network, unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.wandb: Any = importlib.import_module("wandb")
        self.options = {"dir": str(folder), "config": dict(config), "project": PROJECT}
        self.options["mode"] = os.environ.get("WANDB_MODE", "offline")

    def on_train_begin(self, logs: Any = None) -> None:
        self.run = self.wandb.init(**self.options)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.run.log({name: float(value) for name, value in logs.items()}, step=epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self.run.finish()


class LogToMlflow(keras.callbacks.Callback):
    """Logs each epoch to MLflow, in files of a folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        # Releases since 3.7 ask for this before they write files; a server needs neither line.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.mlflow: Any = importlib.import_module("mlflow")
        self.store, self.config = (folder / "mlflow").as_uri(), dict(config)

    def on_train_begin(self, logs: Any = None) -> None:
        self.mlflow.set_tracking_uri(self.store)
        self.mlflow.set_experiment(PROJECT)
        self.mlflow.start_run()
        self.mlflow.log_params(self.config)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        metrics = {name: float(value) for name, value in logs.items()}
        self.mlflow.log_metrics(metrics, step=epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self.mlflow.end_run()


def main() -> None:
    """Train, with a callback for each tracker that is installed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    default = Path(tempfile.gettempdir()) / "kerasdist_runs"
    parser.add_argument("--folder", type=Path, default=default)
    options = parser.parse_args()
    folder = options.folder.resolve()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    config = {"batch_size": 64, "replicas": strategy.num_replicas_in_sync}
    callbacks = []
    if strategy.is_chief:  # the others need not have the packages, nor the folder
        folder.mkdir(parents=True, exist_ok=True)
        trackers = {"wandb": LogToWandb, "mlflow": LogToMlflow}
        callbacks = [
            kd.callbacks.ChiefOnly(tracker(folder, config))
            for package, tracker in trackers.items()
            if importlib.util.find_spec(package)
        ]
    history = model.fit(
        *(x[:1200], y[:1200]),
        batch_size=config["batch_size"],
        epochs=options.epochs,
        validation_data=(x[1200:], y[1200:]),
        callbacks=callbacks,
        verbose=0,
    )
    print(
        f"{strategy.num_replicas_in_sync} replicas: loss {history.history['loss'][-1]:.4f}, "
        f"{len(callbacks)} trackers"
    )


if __name__ == "__main__":
    main()
