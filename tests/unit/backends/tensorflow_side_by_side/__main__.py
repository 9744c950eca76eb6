"""``python -m tests.unit.backends.tensorflow_side_by_side 2 runs [case ...]``: on two replicas."""

import importlib
import json
import sys
import traceback

import kerasdist as kd


def main():
    """Prints a complaint a case of a module, empty where all is well."""
    replicas, module, *chosen = int(sys.argv[1]), *sys.argv[2:]
    kd.config.set_logical_cpu_devices(replicas)
    import tensorflow as tf

    from tests.unit.backends.tensorflow_side_by_side.harness import CASES, plain, same

    importlib.import_module(f"{__package__}.{module}")
    devices = [f"CPU:{index}" for index in range(replicas)]
    complaints = {}
    for name in chosen or CASES:
        try:
            # TensorFlow's collectives on CPUs fail for good after a first mistake, and when a list
            # of several shapes is reduced eagerly.
            one_device = tf.distribute.ReductionToOneDevice()
            engine = tf.distribute.MirroredStrategy(devices, cross_device_ops=one_device)
            native = plain(CASES[name](tf.distribute, engine))
            same(native, plain(CASES[name](kd, kd.MirroredStrategy(devices))))
            complaints[name] = ""
        except Exception:  # noqa: BLE001  all are to be told
            complaints[name] = traceback.format_exc()
    print(json.dumps(complaints))


if __name__ == "__main__":
    main()
