"""Where workers meet if one of them asks for it, at the end of a batch."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from kerasdist.job.client import Client
from kerasdist.job.coordinator import Coordinator
from kerasdist.launch.placement import free_port
from tests.unit.job.simulated_workers import MINE, PATIENT

WORKERS, PLACES = 5, 60


def test_workers_meet_where_one_asks_or_at_the_next_place():
    """Each step waits for all, as its collectives do, so no worker is more than a step ahead."""
    port = free_port()
    Coordinator("127.0.0.1", port, WORKERS, PATIENT, MINE)
    asks = [random.Random(rank).sample(range(PLACES), 4) for rank in range(WORKERS)]

    def met_at(rank: int) -> list[int]:
        facts = {"rank": rank, "num_workers": WORKERS, "pid": rank, "host": "here", "port": 1}
        client = Client("127.0.0.1", port, facts, PATIENT, MINE)
        found = []
        for place in range(PLACES):
            client.meet("main", place, f"the step {place}", None)
            if client.meets_here(wants=place in asks[rank]):
                found.append(place)
        client.close()
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        first, *others = pool.map(met_at, range(WORKERS))
    assert all(each == first for each in others)
    for place in {place for places in asks for place in places if place < PLACES - 1}:
        assert place in first or place + 1 in first
    assert all(any(met - 1 in each or met in each for each in asks) for met in first)
