"""Starts a group of workers, and tells of their cases as one: the worst of what they say counts.

    python -m tests.multiprocess.group --backend jax --layout 2x1 < names-of-cases

It speaks as `tests.conformance.worker` does, so that the same runner reads it. If a worker dies,
or falls behind the others, all are killed.
"""

import argparse
import functools
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque

from kerasdist.cli.launch.placement import free_port
from tests.conformance import registry
from tests.environment import WORKERS, values
from tests.multiprocess import worker
from tests.multiprocess.forks import Fork, imported
from tests.multiprocess.layouts import Layout

BEHIND_SECONDS = 400.0
ORDER = ("passed", "refused", "left out", "failed", "error")


class Group:
    def __init__(self, backend: str, layout: Layout, keys: list[str]):
        self.lines: queue.Queue[tuple[int, dict | None]] = queue.Queue()
        self._waiting: list[deque[dict]] = [deque() for _ in range(layout.workers)]
        os.environ.update(values(WORKERS))
        imported(backend)
        work = functools.partial(worker.main, backend, layout, keys)
        at = free_port()
        self.workers = [Fork(work, _place(layout, rank, at)) for rank in range(layout.workers)]
        for rank, one in enumerate(self.workers):
            threading.Thread(target=self._read, args=(rank, one.stdout), daemon=True).start()
            threading.Thread(target=_log, args=(rank, one.stderr), daemon=True).start()

    def _read(self, rank: int, stream):
        for line in stream:
            self.lines.put((rank, json.loads(line)))
        self.lines.put((rank, None))

    def together(self) -> list[dict]:
        """Waits for the next line of every worker; the first may take its time."""
        while not all(self._waiting):
            try:
                rank, line = self.lines.get(timeout=BEHIND_SECONDS if any(self._waiting) else None)
            except queue.Empty:
                absent = [rank for rank, lines in enumerate(self._waiting) if not lines]
                raise RuntimeError(f"workers {absent} are far behind the others") from None
            if line is None:
                code = self.workers[rank].wait(10)
                time.sleep(2)  # let the others say what they saw
                raise RuntimeError(f"worker {rank} ended with exit code {code}")
            self._waiting[rank].append(line)
        return [lines.popleft() for lines in self._waiting]

    def kill(self):
        for one in self.workers:
            one.kill()
        for one in self.workers:
            one.wait(10)


def _place(layout: Layout, rank: int, port: int) -> dict[str, str]:
    return {
        "KERASDIST_RANK": str(rank),
        "KERASDIST_WORKERS": str(layout.workers),
        "KERASDIST_COORDINATOR": f"localhost:{port}",
        "KERASDIST_LOCAL_RANK": str(rank % layout.workers_a_host),
        "KERASDIST_LOCAL_WORKERS": str(layout.workers_a_host),
        # Longer than the chief computes plain Keras's numbers, for which the others wait.
        "KERASDIST_MEETING_TIMEOUT": "200",
        "KERASDIST_HEARTBEAT_TIMEOUT": "30",
    }


def _log(rank: int, stream):
    for line in stream:
        sys.stderr.write(f"[{rank}] {line}")
        sys.stderr.flush()


def merged(lines: list[dict]) -> dict:
    """One line for what all workers say."""
    first = lines[0]
    if first["event"] != "end":
        return first
    worst = max(lines, key=lambda line: ORDER.index(line["status"]))
    messages = [f"worker {r}: {line['message']}" for r, line in enumerate(lines) if line["message"]]
    return {
        **worst,
        "message": "\n".join(messages),
        "difference": max(line["difference"] for line in lines),
        "cpu_seconds": sum(line["cpu_seconds"] for line in lines),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=registry.BACKENDS)
    parser.add_argument("--layout", type=Layout.of, required=True)
    arguments = parser.parse_args()
    keys = [line.strip() for line in sys.stdin if line.strip()]
    group = Group(arguments.backend, arguments.layout, keys)
    signal.signal(signal.SIGTERM, lambda *_: (group.kill(), os._exit(143)))
    line = {"event": "start"}
    try:
        while line["event"] != "done":
            line = merged(group.together())
            print(json.dumps(line), flush=True)
    except RuntimeError as error:
        print(f"===== {error} =====", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    finally:
        if line["event"] != "done":
            group.kill()
    for one in group.workers:
        one.wait(30)


if __name__ == "__main__":
    main()
