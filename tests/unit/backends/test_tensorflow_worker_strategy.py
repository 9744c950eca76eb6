"""Tripwire: what many workers need of TensorFlow's private parts is where it should be.

A failure here means that TensorFlow moved something, and
`kerasdist/backends/tensorflow/private/strategies.py` is the file to mend.
"""

import json

from tests.fresh import run_forked

# A job of one: the same native strategy, whose sums are of one worker.
PROBE = """
import json, types
import tensorflow as tf
from kerasdist.backends.tensorflow.private import strategies
from kerasdist.backends.tensorflow.replica.all_reduce import communication_hint
from kerasdist.backends.tensorflow.workers.group import WorkerGroup
from kerasdist.api.options import CommunicationOptions
from kerasdist.cli.launch.placement import free_port

address = f"127.0.0.1:{free_port()}"
strategies.start_server([address], 0)
options = CommunicationOptions(timeout_seconds=20.0)
native_strategy, other = (
    strategies.WorkersStrategy([address], 0, ["/device:CPU:0"], options) for _ in range(2)
)
job = types.SimpleNamespace(rank=0, num_workers=1, is_watched=False, collectives=None)
group = WorkerGroup(native_strategy, job, options, shares_memory=True)
told = CommunicationOptions(bytes_per_pack=4, implementation="RING", timeout_seconds=20.0)
small = WorkerGroup(other, job, told, shares_memory=True)

def collectives(group):
    # The hints and time-outs of the collectives that sum two gradients.
    sums = tf.function(lambda: group.sums([[tf.ones(3)], [tf.ones(3)]]))
    operations = sums.get_concrete_function().graph.get_operations()
    return [
        [one.get_attr("communication_hint").decode(), one.get_attr("timeout_seconds")]
        for one in operations if one.type == "CollectiveReduceV2"
    ]

print(json.dumps({
    "hints": [
        communication_hint(CommunicationOptions(implementation=name), devices)
        for name in ("AUTO", "RING", "NCCL")
        for devices in (["/device:CPU:0"], ["/job:worker/task:1/device:GPU:0"])
    ],
    "collectives": [collectives(one) for one in (group, small)],
}))
"""


def test_sums_travel_as_the_strategy_is_told_in_the_runtimes_spelling():
    found = json.loads(run_forked(PROBE, "tensorflow").splitlines()[-1])
    # No GPU is here, so that two would be virtual ones.
    assert found["hints"] == ["auto", "auto", "ring", "ring", "ring", "nccl"]
    assert found["collectives"] == [[["auto", 20.0]], [["ring", 20.0], ["ring", 20.0]]]
