"""A worker of ``kerasdist test``: ``python -m kerasdist.cli.diagnostics.cluster_test_worker``."""

from __future__ import annotations

import hashlib
import platform
import time
from typing import Any

import keras
import numpy as np

from kerasdist.api.replica_context import ReplicaContext
from kerasdist.api.scopes import get_replica_context
from kerasdist.api.strategy import Strategy
from kerasdist.callbacks.telemetry import all_reduce
from kerasdist.cli.diagnostics.findings import Finding, as_dicts, judge
from kerasdist.core.sharding import size
from kerasdist.job import launcher
from kerasdist.job.comparison import named_places, named_workers
from kerasdist.keras_compat import ops
from kerasdist.strategies.mirrored import auto

Array = np.ndarray[Any, Any]

STEPS = 20
_STEPS_AN_EPOCH = 5
_FEATURES, _OUTPUTS = 8, 4

TOLERANCE = 1e-4
"""The largest difference between weights that counts as a rounding error. The weights are about 1.

After 20 steps with BatchNormalization the difference is 2e-7. It would be 2e-1 if each replica
normalized with the mean and variance of its own examples only.
"""

_BYTES = 64 << 20
_BYTES_ON_CPU = 8 << 20


def main() -> None:
    """Runs all checks; the chief reports their findings."""
    began = time.perf_counter()
    strategy = auto()
    findings = [
        devices(strategy, time.perf_counter() - began),
        *collectives(strategy),
        bandwidth(strategy),
        *equality(strategy),
    ]
    if strategy.is_chief:
        launcher.print_result(as_dicts(findings))


def everyone(strategy: Strategy, label: str, value: object) -> list[Any]:
    """Returns the values of all workers, by rank. All workers must call this function."""
    job = None if strategy.replica_set is None else strategy.replica_set.job
    return [value] if job is None else job.all_gather_object(label, value)


def devices(strategy: Strategy, seconds: float) -> Finding:
    """Returns a finding that lists the devices and hosts that take part."""
    own = f"{platform.node()}: {', '.join(strategy.extended.worker_devices)}"
    workers = everyone(strategy, "devices", own)
    count = strategy.num_replicas_in_sync
    places = {rank: f"on {text}" for rank, text in enumerate(workers)}
    found = f"{count} replicas of {len(workers)} workers, after {seconds:.1f} s; "
    found += named_places(places)
    said = "There is one replica, so nothing is exchanged. Start more: --workers 2."
    ok = "All workers have found each other."
    return judge("devices", found, ok, warning=said if count == 1 else "")


def collectives(strategy: Strategy) -> list[Finding]:
    """Checks sum, gather and broadcast against known results."""
    count = strategy.num_replicas_in_sync
    replicas = strategy.replica_set
    assert replicas is not None
    total = _run(strategy, lambda here, x: here.all_reduce("SUM", x), (3,), 1)
    gathered = _run(strategy, lambda here, x: here.all_gather(x, axis=0), (2, 1), 0)
    # At first, the elements of each worker's variable are the worker's rank. `equalize` must give
    # every worker the chief's values, which are 0.
    with strategy.scope():
        variable = keras.Variable(np.full((3,), replicas.rank, "float32"))
    replicas.equalize([variable])
    return [
        _judged(strategy, "sum", total, np.full((3,), count * (count + 1) / 2)),
        _judged(strategy, "gather", gathered, np.repeat(np.arange(count), 2)[:, None]),
        _judged(strategy, "broadcast", _local(strategy, variable), np.zeros((3,))),
    ]


def _run(strategy: Strategy, call: Any, shape: tuple[int, ...], first: int) -> list[Array]:
    """Runs a collective on all replicas, and returns the results of this worker's replicas.

    Each replica passes an array that is filled with the replica's number plus `first`.
    """

    def replica(x: Any) -> Any:
        here = get_replica_context()
        assert isinstance(here, ReplicaContext)
        return call(here, x)

    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full(shape, ctx.replica_id_in_sync_group + first, "float32")
    )
    return _local(strategy, strategy.run(replica, args=(value,)))


def _local(strategy: Strategy, value: object) -> list[Array]:
    return [ops.convert_to_numpy(part) for part in strategy.experimental_local_results(value)]


def _judged(strategy: Strategy, name: str, parts: list[Array], expected: Array) -> Finding:
    own = [
        f"{part.tolist()!r:.80}"
        for part in parts
        if part.shape != expected.shape or not np.array_equal(part, expected)
    ]
    told = everyone(strategy, name, own)
    wrong = [f"{texts[0]} on worker {rank}" for rank, texts in enumerate(told) if texts]
    found, problem = "right on every replica", ""
    if wrong:
        found = f"{wrong[0]}, expected {expected.tolist()!r:.80}"
        problem = "Training would be wrong. Report it, with the versions that kerasdist info shows."
    return judge(name, found, "Replicas exchange values.", problem=problem)


def bandwidth(strategy: Strategy) -> Finding:
    """Measures how fast a large array is summed over all replicas."""
    if strategy.num_replicas_in_sync == 1:
        return Finding("bandwidth", "ok", "nothing to exchange", "There is one replica.")
    is_cpu = strategy.extended.worker_devices[0].startswith("cpu")
    sum_of = all_reduce(strategy, (_BYTES_ON_CPU if is_cpu else _BYTES) // 4)
    found = (
        f"{size(sum_of.bytes)} summed in {sum_of.seconds * 1e3:.1f} ms: "
        f"{size(sum_of.bus_bandwidth)}/s sent by each replica"
    )
    said = (
        "The gradients of 100 million float32 parameters take "
        f"{sum_of.seconds * 4e8 / sum_of.bytes:.2g} s a step; the backward pass hides a part of it."
    )
    return Finding("bandwidth", "ok", found, said)


def equality(strategy: Strategy) -> list[Finding]:
    """Trains a model under the strategy and on one device, and compares the weights."""
    batch = max(32, 8 * strategy.num_replicas_in_sync)
    last = batch // 2 + 3  # the size of the last batch, which the replicas cannot divide evenly
    x, y = _data((_STEPS_AN_EPOCH - 1) * batch + last)
    options = {"batch_size": batch, "epochs": STEPS // _STEPS_AN_EPOCH, "shuffle": False}
    alone = _model()
    start = alone.get_weights()
    losses = alone.fit(x, y, verbose=0, **options).history["loss"]
    with strategy.scope():
        model = _model()
    model.set_weights(start)
    found_losses = model.fit(x, y, verbose=0, **options).history["loss"]
    weights = model.get_weights()
    difference = max(map(_difference, weights, alone.get_weights()))
    of_loss = _difference(np.array(found_losses), np.array(losses))
    differences = everyone(strategy, "differences", [float(difference), float(of_loss)])
    worst, worst_loss = map(max, zip(*differences, strict=True))
    findings = [_equal_to_one_device(worst, worst_loss, batch, last)]
    digest = hashlib.sha256(b"".join(one.tobytes() for one in weights)).hexdigest()
    digests = everyone(strategy, "weights", digest)
    if len(digests) > 1:
        findings.append(_equal_on_workers(digests))
    return findings


def _data(examples: int) -> tuple[Array, Array]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(examples, _FEATURES)).astype("float32")
    y = np.tanh(x @ generator.normal(size=(_FEATURES, _OUTPUTS))).astype("float32")
    return x, y


def _model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((_FEATURES,)),
            layers.Dense(32, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.Dense(_OUTPUTS),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    return model


def _difference(ours: Array, theirs: Array) -> float:
    # A NaN counts as a difference that is larger than any number.
    return float(np.nan_to_num(np.max(np.abs(ours - theirs)), nan=np.inf))


def _equal_to_one_device(difference: float, of_loss: float, batch: int, last: int) -> Finding:
    is_equal = difference <= TOLERANCE and of_loss <= TOLERANCE
    found = (
        f"weights {'equal to' if is_equal else 'against'} one device: {difference:.0e}, losses: "
        f"{of_loss:.0e} ({STEPS} steps, BatchNormalization, batches of {batch}, the last of {last})"
    )
    said = (
        f"More than rounding ({TOLERANCE:.0e}): weights here differ from those on one device. "
        "Report it, with the versions that kerasdist info shows."
    )
    ok = "Replicas compute what one device computes."
    return judge("training", found, ok, problem="" if is_equal else said)


def _equal_on_workers(digests: list[str]) -> Finding:
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    found, problem = "weights equal to the bit", ""
    if other:
        found = f"weights of {named_workers(other)} differ from the chief's"
        problem = "The workers' models differ. Report this, with the versions of kerasdist info."
    return judge("workers", found, "All workers have the same model.", problem=problem)


if __name__ == "__main__":
    main()
