"""Resolvers of the cluster, modelled on ``tf.distribute.cluster_resolver``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kerasdist.cluster.detection import TPUClusterResolver, detect
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
from kerasdist.core.earlier_names import resolve

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
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "detect",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Refuses resolvers of ``tf.distribute`` that kerasdist does not have, with advice."""
        return resolve("kerasdist.cluster", sys.modules[__name__], name)
