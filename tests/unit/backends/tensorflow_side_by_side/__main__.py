"""``python -m tests.unit.backends.tensorflow_side_by_side [case ...]``: on two and three."""

import importlib
import json
import sys
import traceback

import kerasdist as kd

MODULES = ("crossing", "loops", "runs")
REPLICAS = (2, 3)


def main():
    """Prints a complaint a case, empty where all is well, by replicas, module and name."""
    chosen = sys.argv[1:]
    kd.config.set_logical_cpu_devices(max(REPLICAS))
    import tensorflow as tf

    from tests.unit.backends.tensorflow_side_by_side.harness import CASES, plain, same

    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    complaints = {}
    for replicas in REPLICAS:
        devices = [f"CPU:{index}" for index in range(replicas)]
        for function in CASES:
            if chosen and function.__name__ not in chosen:
                continue
            try:
                # TensorFlow's collectives on CPUs fail for good after a first mistake, and when a
                # list of several shapes is reduced eagerly.
                one_device = tf.distribute.ReductionToOneDevice()
                engine = tf.distribute.MirroredStrategy(devices, cross_device_ops=one_device)
                native = plain(function(tf.distribute, engine))
                same(native, plain(function(kd, kd.MirroredStrategy(devices))))
                complaint = ""
            except Exception:  # noqa: BLE001  all are to be told
                complaint = traceback.format_exc()
            module = function.__module__.rpartition(".")[2]
            complaints[f"{replicas} {module} {function.__name__}"] = complaint
    print(json.dumps(complaints))


if __name__ == "__main__":
    main()
