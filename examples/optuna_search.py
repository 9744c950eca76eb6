"""Search hyperparameters with Optuna: each trial trains on all devices.

One strategy serves all trials, and each trial makes its model in the scope. Optuna's pruner stops a
trial that is worse than half of the others at the same epoch. In a job all workers must train the
same trials. They do, because the sampler has a seed, and learns from the logs of `fit`, which are
the same on all workers. To let each worker train trials of its own instead, set
KERASDIST_CLUSTER=none, and give `create_study` a storage that all workers share.

    KERAS_BACKEND=jax python examples/optuna_search.py
"""

import argparse

import keras
import numpy as np
import optuna
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kerasdist as kd

BATCH_SIZE = 64


class Report(keras.callbacks.Callback):
    """Tells Optuna of each epoch, and ends the trial where the pruner says so."""

    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.trial.report((logs or {})["val_accuracy"], epoch)
        self.model.stop_training = self.trial.should_prune()


def build_model(trial: optuna.Trial) -> keras.Model:
    """Return a compiled model, with what Optuna suggests."""
    units = trial.suggest_int("units", 8, 64, log=True)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(
                units, activation=trial.suggest_categorical("activation", ["relu", "tanh"])
            ),
            layers.Dense(10, activation="softmax"),
        ]
    )
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def draw(path: str, study: optuna.Study) -> None:
    """Draw a curve for each trial; those that were pruned end early."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    for trial in study.trials:
        epochs = [epoch + 1 for epoch in trial.intermediate_values]
        label = f"trial {trial.number + 1}, rate {trial.params['rate']:.2g}"
        plt.plot(epochs, list(trial.intermediate_values.values()), marker="o", label=label)
    plt.xlabel("epoch")
    plt.ylabel("validation accuracy")
    plt.legend(fontsize=8)
    plt.savefig(path)


def main() -> None:
    """Search; print the accuracy of the best trial."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    digits = load_digits()
    parts = train_test_split(
        *(digits.data / 16, digits.target), train_size=1344, test_size=448, random_state=0
    )  # full batches: JAX compiles each size
    x_train, x_test, y_train, y_test = (np.asarray(part, "float32") for part in parts)

    def objective(trial: optuna.Trial) -> float:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build_model(trial)
        history = model.fit(
            x_train,
            y_train,
            batch_size=BATCH_SIZE,
            epochs=options.epochs,
            validation_data=(x_test, y_test),
            callbacks=[Report(trial)],
            verbose=0,
        )
        accuracy = history.history["val_accuracy"]
        pruned = len(accuracy) < options.epochs
        end = f"pruned after {len(accuracy)} epochs" if pruned else "complete"
        settings = "{units} units, {activation}, rate {rate:.2g}".format(**trial.params)
        print(f"trial {trial.number + 1}: {settings}: accuracy {accuracy[-1]:.4f}, {end}")
        if pruned:
            raise optuna.TrialPruned
        return accuracy[-1]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=options.trials)
    if options.figure:
        draw(options.figure, study)
    first, best = study.trials[0].value, study.best_value
    replicas = strategy.num_replicas_in_sync
    print(f"{replicas} replicas: accuracy {best:.4f} in the best trial, {first:.4f} in the first")


if __name__ == "__main__":
    main()
