"""A worker of workers.py: `python worker.py WHAT KIND FOLDER` writes its outcome to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import torch

import kerasdist as kd
from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base.interface import ReplicaOptions
from kerasdist.cluster.source import Membership
from kerasdist.core.devices import parse_devices
from kerasdist.job.job import join_job
from kerasdist.training import hooks
from smoke.models import EXAMPLES, SEED, exact, outcome
from smoke.workers import KILLED

RATE = 0.5


def _strategy(kind: str) -> Strategy:
    device = f"{kind}:0"
    if os.environ["KERASDIST_WORKERS"] != "1":
        with _gloo_alone():
            return kd.MultiWorkerMirroredStrategy(devices=[device])
    # A strategy of one worker is plain Keras's, so that no group would be made.
    backend = registry.current()
    where = os.environ["KERASDIST_COORDINATOR"]
    job, _ = join_job(Membership("chief", 0, 0, 1, (), where, "gpu_smoke"), {})
    backend.connect(job)
    replicas = backend.replica_set(parse_devices([device]), ReplicaOptions(), job)
    job.after_connecting()
    hooks.install()
    return Strategy(replicas)


def _gloo_alone() -> Any:
    """Two processes on one GPU: torch's group without NCCL."""
    make = torch.distributed.init_process_group
    return mock.patch.object(
        torch.distributed,
        "init_process_group",
        lambda backend, *args, **kwargs: make("gloo", *args, **kwargs),
    )


class Kill(keras.callbacks.Callback):
    """Ends worker 1 in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and os.environ["KERASDIST_RANK"] == "1":
            os._exit(KILLED)


def _found(what: str, strategy: Strategy) -> dict[str, Any]:
    if what == "draws":
        keras.utils.set_random_seed(SEED)
        layer = keras.layers.Dropout(RATE)
        ones = np.ones((64, 16), "float32")
        kept = strategy.run(lambda: layer(keras.ops.convert_to_tensor(ones), training=True))
        [own] = strategy.experimental_local_results(kept)
        return {"kept": keras.ops.convert_to_numpy(own) > 0}
    name, callbacks = ("mlp", [Kill()]) if what == "killed" else (what, [])
    example = EXAMPLES[name]
    with strategy.scope():
        model = example.compiled()
    return outcome(model, *example.data(), callbacks=callbacks)


def main(what: str, kind: str, folder: str) -> None:
    strategy = _strategy(kind)
    exact()
    np.savez(Path(folder) / f"{os.environ['KERASDIST_RANK']}.npz", **_found(what, strategy))


if __name__ == "__main__":
    main(*sys.argv[1:])
