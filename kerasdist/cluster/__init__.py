"""Resolvers of the cluster, in the manner of ``tf.distribute.cluster_resolver``.

A public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasdist import lazy

if TYPE_CHECKING:
    from kerasdist.cluster.cloud_tpu import CloudTPUClusterResolver
    from kerasdist.cluster.detection import detect
    from kerasdist.cluster.keras_variables import KerasClusterResolver
    from kerasdist.cluster.kerasdist_variables import KerasdistClusterResolver
    from kerasdist.cluster.kubernetes import KubernetesClusterResolver
    from kerasdist.cluster.membership import Membership
    from kerasdist.cluster.openmpi import OpenMPIClusterResolver
    from kerasdist.cluster.pmi import PMIClusterResolver
    from kerasdist.cluster.resolver import ClusterResolver, SimpleClusterResolver
    from kerasdist.cluster.slurm import SlurmClusterResolver
    from kerasdist.cluster.spec import ClusterSpec
    from kerasdist.cluster.tf_config import TFConfigClusterResolver
    from kerasdist.cluster.torchrun import TorchrunClusterResolver

__all__ = [
    "CloudTPUClusterResolver",
    "ClusterResolver",
    "ClusterSpec",
    "KerasClusterResolver",
    "KerasdistClusterResolver",
    "KubernetesClusterResolver",
    "Membership",
    "OpenMPIClusterResolver",
    "PMIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "detect",
]

_HOMES = {
    "CloudTPUClusterResolver": "cloud_tpu",
    "ClusterResolver": "resolver",
    "ClusterSpec": "spec",
    "KerasClusterResolver": "keras_variables",
    "KerasdistClusterResolver": "kerasdist_variables",
    "KubernetesClusterResolver": "kubernetes",
    "Membership": "membership",
    "OpenMPIClusterResolver": "openmpi",
    "PMIClusterResolver": "pmi",
    "SimpleClusterResolver": "resolver",
    "SlurmClusterResolver": "slurm",
    "TFConfigClusterResolver": "tf_config",
    "TorchrunClusterResolver": "torchrun",
    "detect": "detection",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
