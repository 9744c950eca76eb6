"""One worker of a group: runs cases with the others, and tells of each in a JSON line.

Forked by `tests.multiprocess.group`, with kerasdist's variables in the environment.
"""

import faulthandler
import json
import os
import sys

from tests.conformance import registry
from tests.conformance.worker import collect, reset, run_item
from tests.gpu_like import emulation
from tests.multiprocess.lab import labs, sharding_of
from tests.multiprocess.layouts import Layout, cases


def main(backend: str, layout: Layout, keys: list[str]):
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**line):
        lines.write(json.dumps(line) + "\n")
        lines.flush()

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
    keras.utils.disable_interactive_logging()
    keras.config.disable_traceback_filtering()
    collect()
    known = cases()
    with strategy.scope():
        keras.Sequential()  # so that plain models beside the strategy are clearly meant
    tell(event="ready", backend=backend)
    for key in keys:
        item = registry.Item(known[key], backend, layout.replicas)
        faulthandler.dump_traceback_later(item.case.seconds, exit=True)
        tell(event="start", key=key)
        print(f"\n===== {key} =====", file=sys.stderr, flush=True)
        line = run_item(item, lab_of)
        if line["traceback"]:
            print(line["traceback"], file=sys.stderr, flush=True)
        reset()
        # Nobody may go on alone: after a failure the next case would begin elsewhere.
        job.all_gather_object(f"end of {key}", line["status"])
        tell(event="end", key=key, **line)
    faulthandler.cancel_dump_traceback_later()
    tell(event="done")
    lines.flush()
    sys.stderr.flush()
    job.leave()
    os._exit(0)  # a case may leave a thread behind; it shall not keep us from ending
