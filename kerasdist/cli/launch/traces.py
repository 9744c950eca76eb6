"""Merges the workers' traces into one trace, in which each worker is a process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kerasdist.core import whole_files
from kerasdist.job.launcher import ProfiledSteps

Event = dict[str, Any]
"""A JSON object: an event of a trace, or a whole trace."""

MERGED = "trace.json.gz"

# Kinds of events that Chrome's trace format links by their ids. In the merged trace the ids of
# different workers must differ.
_LINKED = frozenset("stfbneNOD")


def forget_old(steps: ProfiledSteps) -> None:
    """Removes the traces of an earlier run."""
    for path in (steps.folder / MERGED, *steps.folder.glob("worker-*.trace.json.gz")):
        path.unlink(missing_ok=True)


def merge(steps: ProfiledSteps, workers: int) -> str:
    """Writes one trace of all workers; returns the message for the user."""
    paths = {rank: steps.of_worker(rank) for rank in range(workers)}
    found = {rank: path for rank, path in paths.items() if path.exists()}
    missing = [str(rank) for rank in paths if rank not in found]
    if not found:
        return (
            f"no worker has written a profile to {steps.folder}: was there a fit of more than "
            f"{steps.first} steps, of a model made in a strategy's scope?"
        )
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in found.values()]
    target = steps.folder / MERGED
    with whole_files.replacing(target) as unfinished:
        text = json.dumps({"traceEvents": merged(traces), "displayTimeUnit": "ms"})
        Path(unfinished).write_bytes(gzip.compress(text.encode(), 5))
    said = f"the profile is {target}: open it at https://ui.perfetto.dev"
    if missing:
        said += (
            f"\nwarning: it lacks worker {', '.join(missing)}: --profile-dir must be a folder that "
            "this machine shares with the workers' machines"
        )
    return said


def merged(traces: Sequence[Event]) -> list[Event]:
    """Returns the events of all traces, with times that count from the first event."""
    timed = [one["ts"] for trace in traces for one in trace["traceEvents"] if "ts" in one]
    first = min(timed, default=0.0)
    return [one for trace in traces for one in _of_worker(trace, first)]


def _of_worker(trace: Event, first: float) -> Iterator[Event]:
    facts, events = trace["kerasdist"], trace["traceEvents"]
    worker = facts["worker"]
    names: dict[tuple[object, ...], str] = {}
    for one in events:
        if one.get("ph") == "M" and one.get("name") in ("process_name", "thread_name"):
            thread = one.get("tid") if one["name"] == "thread_name" else None
            names[one["name"], one.get("pid"), thread] = one["args"]["name"]
    yield _metadata("process_name", worker, 0, f"worker {worker} ({facts['host']})")
    yield {**_metadata("process_sort_index", worker, 0, ""), "args": {"sort_index": worker}}
    rows: dict[tuple[object, object], int] = {}
    for one in events:
        if one.get("ph") == "M" or "ts" not in one:
            continue
        key = one.get("pid"), one.get("tid")
        if key not in rows:
            rows[key] = len(rows)
            process = names.get(("process_name", key[0], None), str(key[0]))
            thread = names.get(("thread_name", *key))
            name = f"{process}: {thread}" if thread else process
            yield _metadata("thread_name", worker, rows[key], name)
        moved = {**one, "pid": worker, "tid": rows[key], "ts": one["ts"] - first}
        if "id" in one and one.get("ph") in _LINKED:
            moved["id"] = f"{worker}-{one['id']}"
        yield moved


def _metadata(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
