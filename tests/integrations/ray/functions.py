"""What workers do on Ray; nothing here imports a framework before it is called."""

import os
import signal
import sys
from pathlib import Path

from kerasdist.cluster import detect
from kerasdist.job.job import join_job


def joined():
    job, _ = join_job(detect().membership(), {"keras": "1"})
    job.after_connecting()
    return job


def tell(greeting: str, *, name: str):
    job = joined()
    names = ("KERASDIST_LOCAL_RANK", "KERASDIST_LOCAL_WORKERS", "KERASDIST_RESTART")
    return {
        "said": f"{greeting} {name}",
        "ranks": job.all_gather_object("ranks", job.rank),
        "imported": sorted({"keras", "torch"} & set(sys.modules)),
        "variables": [os.environ[each] for each in (*names, "KERAS_BACKEND")],
        "process": os.getpid(),
    }


def raise_an_error():
    job = joined()
    if job.rank == 1:
        raise LookupError("no such file\nand a second line")
    job.all_gather_object("the next step", None)


def be_killed_the_first_time(folder: str):
    job = joined()
    restart = int(os.environ["KERASDIST_RESTART"])
    (Path(folder) / f"{restart}-{job.rank}").write_text(str(os.getpid()), encoding="utf-8")
    if restart == 0 and job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [restart, *job.all_gather_object("the next step", job.rank)]


def fit(seed: int):
    import keras
    import numpy as np

    import kerasdist as kd

    keras.utils.set_random_seed(seed)
    x, y = np.random.rand(103, 4), np.random.rand(103, 1)

    def built():
        layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse", metrics=["mae"])
        return model

    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    with strategy.scope():
        model = built()
    alone = built()
    alone.set_weights(model.get_weights())
    histories = [
        each.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        for each in (model, alone)
    ]
    return {
        "replicas": strategy.num_replicas_in_sync,
        "histories": histories,
        "weights": [each.get_weights() for each in (model, alone)],
    }
