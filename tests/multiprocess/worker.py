"""One worker of a group: runs cases with the others, and tells of each in a JSON line.

Forked by `tests.multiprocess.group`, with kerasdist's variables in the environment.
"""

import faulthandler
import os

from tests.conformance import registry
from tests.conformance.worker import own_lines, run_items
from tests.gpu_like import emulation
from tests.multiprocess.lab import labs, sharding_of
from tests.multiprocess.layouts import Layout, cases


def main(backend: str, layout: Layout, keys: list[str]):
    tell = own_lines()
    if registry.KIND == "cpu":  # else each has its own accelerator
        os.environ["KERASDIST_CPU_DEVICES"] = str(layout.devices)
    faulthandler.dump_traceback_later(900, exit=True)
    import kerasdist as kd

    if layout.like_gpus:
        emulation.install(backend)
    # Before anything starts the framework.
    # By groups of 64 bytes, each layer is gathered by itself, the smallest ones together.
    by_groups = {"communication_options": kd.CommunicationOptions(bytes_per_pack=64)}
    strategy = kd.MultiWorkerMirroredStrategy(
        sharding=sharding_of(layout), **by_groups if layout.sharding else {}
    )
    if strategy.num_replicas_in_sync != layout.replicas:
        raise SystemExit(f"Expected {layout.replicas} replicas. Received: {strategy}.")
    import keras

    from kerasdist.job.job import current_job

    job = current_job()
    lab_of = labs(strategy, layout)
    known = cases()
    with strategy.scope():
        keras.Sequential()  # so that plain models beside the strategy are clearly meant
    items = ((key, registry.Item(known[key], backend, layout.replicas)) for key in keys)
    for status in run_items(tell, backend, items, lab_of):
        # Nobody may go on alone: after a failure the next case would begin elsewhere.
        job.all_gather_object("end of a case", status)
    job.leave()
    os._exit(0)  # a case may leave a thread behind; it shall not keep us from ending
