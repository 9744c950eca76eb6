"""The public names, imported from the files that define them.

Importing `kerasdist` must import no framework, so `kerasdist` imports this file only when one of
the names is first used. For type checkers only, `kerasdist` also has an import of all these names.
Besides the names of this file, `kerasdist.launch` and the names in `callbacks`, `cluster`,
`config`, `errors` and `experimental` are public. Any other name is private.

A new name needs a line here, a line in ``kerasdist.__all__``, and a line in the test of public
names.
"""

from __future__ import annotations

from kerasdist import cluster as cluster_resolver
from kerasdist.api.checkpoints import load_checkpoint, save_checkpoint
from kerasdist.api.extended import StrategyExtended
from kerasdist.api.functions import function, value_and_grad
from kerasdist.api.layouts import describe_layout
from kerasdist.api.losses import compute_average_loss, scale_regularization_loss
from kerasdist.api.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    RunOptions,
)
from kerasdist.api.replica_context import ReplicaContext, global_batch
from kerasdist.api.scopes import (
    experimental_set_strategy,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    print,
)
from kerasdist.api.strategy import Strategy
from kerasdist.api.values import DistributedValues, Mirrored, PerReplica
from kerasdist.check.report import OneDeviceComparison, compare_with_one_device
from kerasdist.core.partitions import DeviceAssignment
from kerasdist.core.sharding import Sharding
from kerasdist.input.distributed import DistributedDataset, DistributedIterator
from kerasdist.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from kerasdist.strategies import tpu
from kerasdist.strategies.mirrored import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    auto,
)
from kerasdist.strategies.multi_worker import MultiWorkerMirroredStrategy
from kerasdist.strategies.tpu import TPUStrategy, connect_to_cluster
from kerasdist.training.predictions import predict_to
