"""How many workers a job has, where the GPUs of this machine decide it."""

from __future__ import annotations

import os
from dataclasses import replace

from kerasdist.cluster.kerasdist_variables import EACH_ITS_OWN, MIRRORED
from kerasdist.core import gpus
from kerasdist.core.backend_choice import WANT_PROCESS_A_DEVICE, backend_choice
from kerasdist.errors import DeviceError
from kerasdist.launch.spec import GPU, JobSpec


def counted(spec: JobSpec) -> JobSpec:
    """Returns a job whose number of workers on this machine is a number.

    By default there is a worker a GPU on PyTorch, and one on other backends, where one process
    drives all GPUs.
    """
    if spec.hosts or isinstance(spec.workers, int):
        return spec
    environ = {**os.environ, **spec.environment}
    count = len(gpus.visible(environ))
    if spec.workers is None and backend_choice(environ).name not in WANT_PROCESS_A_DEVICE:
        count = 1
    if count == 0 and spec.workers == GPU:
        raise DeviceError(
            "Expected a GPU on this machine, for a worker on each. Received: workers='gpu', "
            f"{gpus.CUDA}={environ.get(gpus.CUDA)!r}, and no GPU that a process sees. Say how many "
            "workers there are to be, for example 2."
        )
    return with_workers(spec, max(1, count))


def with_workers(spec: JobSpec, count: int) -> JobSpec:
    """Returns a job of so many workers, over which a `MirroredStrategy` may be."""
    told = {MIRRORED: EACH_ITS_OWN} if count > 1 else {}
    return replace(spec, workers=count, environment={**told, **spec.environment})
