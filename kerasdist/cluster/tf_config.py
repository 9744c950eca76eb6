"""``TF_CONFIG``, as TensorFlow, Kubeflow's TFJob and Vertex AI set it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast, final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.spec import ClusterSpec
from kerasdist.cluster.tasks import place_of
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError

_VARIABLE = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


def read(variables: Variables) -> Membership | Absent:
    """Reads ``TF_CONFIG``.

    TensorFlow's servers listen at its addresses, so kerasdist uses another port.
    """
    if not variables.has(_VARIABLE):
        return Absent(f"{_VARIABLE} is not set.")
    config = _mapping(_parsed(variables.text(_VARIABLE)), _VARIABLE)
    cluster = _mapping(config.get("cluster") or {}, "cluster")
    if not cluster:
        return Absent(f"{_VARIABLE} has no cluster.")
    task = _mapping(config.get("task") or {}, "task")
    task_type, task_id = _task(task)
    try:
        spec = ClusterSpec(cluster)
    except TypeError as error:
        raise _wrong("lists of addresses in its cluster", cluster) from error
    place = place_of(spec, task_type, task_id, _VARIABLE)
    return Membership(
        task_type=task_type,
        task_id=task_id,
        rank=place.rank,
        num_workers=len(place.addresses),
        addresses=place.addresses,
        coordinator=variables.coordinator(ports.coordinator_of(place.addresses, _VARIABLE)),
        source=SOURCE.name,
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"Expected {_VARIABLE} to be JSON, such as '{_EXAMPLE}'. "
            f"Received: {_VARIABLE}={text!r}, where {error.msg} at character {error.pos}. "
            "JSON has double quotes, and no comma before a closing bracket."
        ) from error


def _task(task: Mapping[str, Any]) -> tuple[str, int]:
    task_type, index = task.get("type"), task.get("index")
    # Some orchestrators write the number as a string, which TensorFlow accepts.
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(task_type, str) or not isinstance(index, int) or isinstance(index, bool):
        raise _wrong("a task with a type and an index, which is this process's own", task)
    return task_type, index


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"an object as {name}", value)
    return cast("dict[str, Any]", value)


def _wrong(expected: str, value: object) -> ClusterError:
    return ClusterError(
        f"Expected {_VARIABLE} to have {expected}, as in '{_EXAMPLE}'. Received: {value!r}."
    )


SOURCE = Source(name=_VARIABLE, kind=Kind.PROCESS, variables=(_VARIABLE,), read=read)


@final
class TFConfigClusterResolver(EnvironmentResolver):
    """The cluster that ``TF_CONFIG`` describes.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If it is missing or wrong.
        UnsupportedError: If the task is a parameter server or an evaluator.
    """

    _source = SOURCE
