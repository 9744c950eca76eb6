"""Resolvers of the cluster, in the manner of ``tf.distribute.cluster_resolver``.

A public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasdist.core import lazy

if TYPE_CHECKING:
    from kerasdist.cluster.detection import detect
    from kerasdist.cluster.membership import Membership
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

_HOMES = {
    "CloudTPUClusterResolver": "resolver",
    "ClusterResolver": "resolver",
    "ClusterSpec": "spec",
    "JAXClusterResolver": "resolver",
    "KerasClusterResolver": "resolver",
    "KerasdistClusterResolver": "resolver",
    "KubernetesClusterResolver": "resolver",
    "Membership": "membership",
    "OpenMPIClusterResolver": "resolver",
    "PMIClusterResolver": "resolver",
    "SimpleClusterResolver": "resolver",
    "SkyPilotClusterResolver": "resolver",
    "SlurmClusterResolver": "resolver",
    "TFConfigClusterResolver": "resolver",
    "TorchrunClusterResolver": "resolver",
    "detect": "detection",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
