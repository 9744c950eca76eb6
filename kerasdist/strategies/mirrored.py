"""The strategies for the devices of one machine, and `auto`, which chooses a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base.interface import Backend, BatchNorm, Check, ReplicaOptions, ReplicaSet
from kerasdist.cluster.detection import detect
from kerasdist.cluster.kerasdist_variables import EACH_ITS_OWN
from kerasdist.core.devices import parse_devices
from kerasdist.core.sharding import Offload
from kerasdist.strategies import processes
from kerasdist.strategies.arguments import ShardingOption, named_devices, replica_options
from kerasdist.strategies.choice import chosen_devices, require_available, require_no_other_workers
from kerasdist.strategies.multi_worker import MultiWorkerMirroredStrategy, replicas_of_job
from kerasdist.training import hooks


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each device holds a replica of the model. Every batch is divided among the replicas, and their
    gradients are combined so that the result equals that of one device with the whole batch.

    On PyTorch with several GPUs, each GPU has its own process: kerasdist starts the script that
    makes the strategy again, once for each GPU but the first. The first process continues as worker
    0, as if ``kerasdist run --workers gpu`` had started it. So the strategy must be the first thing
    that the script makes with Keras. Every process runs the whole script, with the same arguments
    and in the same order. Work that only one process may do, such as writing a report, must be done
    by worker 0 (``KERASDIST_RANK=0``). Lines that the other processes print begin with the name of
    the worker, ``[worker 1/8]``. When one process fails, all processes end with its exit code. In a
    notebook each GPU has a thread instead of a process; to train with processes in a notebook, use
    `kerasdist.launch`.

    Example::

        strategy = kd.MirroredStrategy()  # at the top of the script
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(optimizer="adam", loss="mse")
        model.fit(x, y, batch_size=256)  # 256 examples over all devices

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: None = None,
        *,
        batch_norm: BatchNorm | None = None,
        check: Check | None = None,
        launcher: processes.Launcher | None = None,
        sharding: ShardingOption = None,
        offload: Offload | None = None,
        **earlier: Any,
    ) -> None:
        """Makes the strategy.

        Args:
            devices: Names such as ``["gpu:0", "gpu:1"]``. None means all accelerators of this
                machine, or all its CPU devices if it has no accelerator (see
                `kerasdist.config.set_logical_cpu_devices`). CPU devices that do not exist yet are
                made, if the backend has not started.
            cross_device_ops: Must be None. ``tf.distribute`` has this argument; here the backend
                chooses the collectives itself.
            batch_norm: ``"synchronized"``: BatchNormalization uses the global batch, as on one
                device. ``"per_replica"``: it uses each replica's own rows, and the moving
                statistics are averaged; this is faster, but does not give the numbers of one
                device, and JAX does not support it. None: synchronized in `fit`. In custom loops,
                None means that each layer uses the replica's own rows, unless it is
                ``BatchNormalization(synchronized=True)``, as in ``tf.distribute``.
            check: Whether the first training step is compared with the same step on one device, if
                your code could mix examples. If the steps differ, ``"warn"`` gives a warning and
                ``"raise"`` an error; with ``"off"`` they are not compared. None means the value of
                the environment variable ``KERASDIST_CHECK``, or ``"warn"`` if it is not set. See
                `kerasdist.compare_with_one_device`.
            launcher: ``"processes"``: one process per device. Only PyTorch supports this value,
                which can be tried with CPU devices too. ``"threads"``: one process for all devices.
                None: processes on PyTorch with several GPUs, in a script that no launcher has
                started; otherwise threads.
            sharding: Which variables the replicas divide among them, so that a larger model fits.
                None: each replica holds all variables. ``"optimizer"``: the optimizer's variables
                are sharded. ``"full"``: the weights are sharded too. ``"auto"``: like ``"full"``,
                but on JAX a model whose class has a layout map is sharded by that map. TensorFlow
                supports only None. On PyTorch each replica must have its own process. Small
                variables are not sharded, see `kerasdist.Sharding`. On JAX, and on PyTorch with a
                process per device, the argument may also be a ``keras.distribution.LayoutMap`` over
                a mesh whose first axis divides the batch, and whose other axes divide variables.
            offload: Which variables the host's memory holds, so that a larger model fits.
                ``"optimizer"``: the optimizer's variables that belong to a weight, except small
                variables. A step copies them to the device, updates them, and copies them back.
                This works with and without `sharding`. TensorFlow does not support it.
            **earlier: Arguments of the first versions of ``tf.distribute``. `num_gpus` and
                `num_gpus_per_worker` give a number of GPUs in place of `devices`. The error for any
                other argument says what to write instead.

        Raises:
            JobError: In a worker of a job of several workers, unless ``kerasdist run --workers
                gpu`` or `kerasdist.launch` has started it (see
                `kerasdist.MultiWorkerMirroredStrategy`). Also if the processes do not find each
                other.
            DeviceError: If a device is unknown or named twice, or there is no device.
            UnsupportedError: If the backend does not support the value of `batch_norm`, `launcher`,
                `sharding` or `offload`, if this process cannot be started again, or if
                `cross_device_ops` is given.
            ValueError: If `batch_norm`, `check`, `launcher`, `sharding` or `offload` has none of
                its allowed values.
        """
        devices = named_devices(devices, earlier | {"cross_device_ops": cross_device_ops})
        told = None if launcher == "threads" else processes.devices_from_launcher()
        if told is None:
            require_no_other_workers("MirroredStrategy")
        backend = registry.current()
        options = replica_options(sharding, batch_norm, check, offload=offload)
        launcher = processes.checked_launcher(launcher, backend)
        super().__init__(_replicas(backend, devices, options, launcher, told))
        hooks.install()


def _replicas(
    backend: Backend,
    names: Sequence[str] | None,
    options: ReplicaOptions,
    launcher: processes.Launcher | None,
    told: str | None,
) -> ReplicaSet:
    """Returns the replicas on this process's devices or, in a job, on all workers' devices."""
    if told != EACH_ITS_OWN:
        chosen = chosen_devices(backend, names)
        if told is not None and len(chosen) > 1:
            processes.check_same(chosen, told)
        elif told is None and processes.are_wanted(backend, chosen, launcher):
            told = processes.start(chosen)
        else:
            return backend.replica_set(chosen, options)
    resolver = detect()
    assert resolver is not None  # by now, the job's environment variables are set
    place = resolver.membership()
    own = processes.checked_names(names, told, place.num_workers, place.rank)
    replicas = replicas_of_job(backend, place, own, options)
    processes.after_joining(told)
    return replicas


@final
class OneDeviceStrategy(Strategy):
    """Places variables and computation on a single device.

    Use this strategy to try out code that will later run under another strategy, or to choose a
    device.

    Example::

        strategy = kd.OneDeviceStrategy("cpu:1")
        with strategy.scope():
            model = build_model()

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    def __init__(self, device: str) -> None:
        """Makes the strategy.

        Args:
            device: The device's name, such as ``"cpu:0"`` or ``"gpu:1"``. TensorFlow's spellings
                are accepted too.

        Raises:
            JobError: In a worker of a job of several workers; use
                `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If this machine has no such device.
        """
        require_no_other_workers("OneDeviceStrategy")
        backend = registry.current()
        devices = parse_devices([device])
        require_available(backend, devices)
        super().__init__(backend.replica_set(devices, ReplicaOptions()))
        hooks.install()


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices of one machine, with the variables on one device.

    Use this strategy for variables that are too large, or too rarely used, to keep a copy on every
    device. The devices read the variables from that one device, which applies the sum of all
    devices' gradients.

    Example::

        strategy = kd.CentralStorageStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = build_model()
            model.compile(optimizer="adam", loss="mse")

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CentralStorageStrategy
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        batch_norm: BatchNorm | None = None,
        check: Check | None = None,
    ) -> None:
        """Makes the strategy.

        Args:
            compute_devices: Names of the devices that compute; None means the same as for
                `kerasdist.MirroredStrategy`.
            parameter_device: Name of the device that holds the variables. None means the computing
                device if there is only one, else ``"cpu:0"``.
            batch_norm: The same as for `kerasdist.MirroredStrategy`.
            check: The same as for `kerasdist.MirroredStrategy`.

        Raises:
            JobError: In a worker of a job of several workers; use
                `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If a device is unknown or named twice, or there is no device.
            UnsupportedError: If the backend does not support the value of `batch_norm`.
            ValueError: If `batch_norm` or `check` has none of its allowed values.
        """
        require_no_other_workers("CentralStorageStrategy")
        backend = registry.current()
        needed = ["cpu:0"] if parameter_device is None else [parameter_device]
        devices = chosen_devices(backend, compute_devices, needed)
        home = parse_devices(needed)[0]
        if parameter_device is None and len(devices) == 1:
            home = devices[0]
        options = replica_options(batch_norm=batch_norm, check=check, parameter_device=home)
        super().__init__(backend.replica_set(devices, options))
        hooks.install()


def auto() -> Strategy:
    """Chooses a strategy by the environment and by the devices of this machine.

    Example::

        strategy = kd.auto()  # at the top of the script
        print(strategy)

    Returns:
        `MultiWorkerMirroredStrategy` in a process that is one of several workers (see
        `kerasdist.cluster.detect`). Otherwise `MirroredStrategy` over all accelerators, or over all
        CPU devices if there is no accelerator. If there is only one such device,
        `OneDeviceStrategy`. The documentation of `MirroredStrategy` says when it starts one
        process per device.
    """
    resolver = detect()
    if resolver is not None and not processes.are_started_by_script():
        return MultiWorkerMirroredStrategy(resolver)
    first, *others = chosen_devices(registry.current(), None)
    return MirroredStrategy() if others else OneDeviceStrategy(str(first))
