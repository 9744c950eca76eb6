"""Runs all cases; prints those that failed, and how."""

import json
import traceback

import kerasdist as kd
from tests.unit.backends.jax_cases import (  # noqa: F401  they register
    normalization,
    planned,
    programs,
    values,
)
from tests.unit.backends.jax_cases.case import CASES, REPLICAS

kd.config.set_logical_cpu_devices(4)
failures = {}
for name, test in CASES.items():
    try:
        test(kd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]))
    except BaseException:  # noqa: BLE001  whatever it is, the others run
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
