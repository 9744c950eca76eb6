"""Resolvers of the cluster, in the manner of ``tf.distribute.cluster_resolver``."""

from __future__ import annotations

from kerasdist.cluster.detection import detect
from kerasdist.cluster.resolver import (
    CloudTPUClusterResolver,
    ClusterResolver,
    JAXClusterResolver,
    KerasClusterResolver,
    KerasdistClusterResolver,
    KubernetesClusterResolver,
    OpenMPIClusterResolver,
    PMIClusterResolver,
    SimpleClusterResolver,
    SkyPilotClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from kerasdist.cluster.source import Membership
from kerasdist.cluster.spec import ClusterSpec

__all__ = [
    "CloudTPUClusterResolver",
    "ClusterResolver",
    "ClusterSpec",
    "JAXClusterResolver",
    "KerasClusterResolver",
    "KerasdistClusterResolver",
    "KubernetesClusterResolver",
    "Membership",
    "OpenMPIClusterResolver",
    "PMIClusterResolver",
    "SimpleClusterResolver",
    "SkyPilotClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "detect",
]
