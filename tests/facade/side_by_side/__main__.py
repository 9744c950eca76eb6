"""``python -m tests.facade.side_by_side [case ...]``: on two or three."""

import importlib
import json
import sys
import traceback

import kerasdist as kd
from tests.facade.side_by_side import REPLICAS, replicas_of

MODULES = ("crossing", "loops", "runs")


def main():
    """Prints a complaint a case, empty where all is well, by replicas, module and name."""
    chosen = sys.argv[1:]
    kd.config.set_logical_cpu_devices(max(REPLICAS))
    import tensorflow as tf

    from tests.facade.side_by_side.harness import CASES, plain, same

    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    complaints = {}
    for function in CASES:
        name = function.__name__
        if chosen and name not in chosen:
            continue
        # A case that is named runs on both.
        for replicas in REPLICAS if chosen else [replicas_of(name)]:
            devices = [f"CPU:{index}" for index in range(replicas)]
            try:
                # TensorFlow's collectives on CPUs fail for good after a first mistake, and when a
                # list of several shapes is reduced eagerly.
                one_device = tf.distribute.ReductionToOneDevice()
                native_strategy = tf.distribute.MirroredStrategy(
                    devices, cross_device_ops=one_device
                )
                native = plain(function(tf.distribute, native_strategy))
                same(native, plain(function(kd, kd.MirroredStrategy(devices))))
                complaint = ""
            except Exception:  # noqa: BLE001  all are to be told
                complaint = traceback.format_exc()
            module = function.__module__.rpartition(".")[2]
            complaints[f"{replicas} {module} {name}"] = complaint
    print(json.dumps(complaints))


if __name__ == "__main__":
    main()
