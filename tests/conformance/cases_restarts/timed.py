"""`save_freq="auto"`: the interval is chosen once, and goes with the backups."""

import itertools

from tests.conformance.interruptions import arrays, run, same, with_chosen_interval
from tests.conformance.registry import case

# The clock of this test goes on by a second each time that it is read. So the five batches between
# the compiled ones and the end of the first epoch take 0.2 s each, and a backup a second. By the
# formula there is one second, or five batches, between two backups, if failures come as often.
CHOSEN = {"save_freq": "auto", "hours_between_failures": 1.35 / 3600}


# The interval is chosen by no backend.
@case("restarts", replicas=(2,), like="restarts.several_steps")
def auto(lab):
    """`save_freq="auto"`: an interrupted run backs up where the other does, and is equal to it."""
    # The end of the first epoch shows what a backup takes; those of the others come three
    # batches after a backup, more than half of five.
    expected, found = with_chosen_interval(
        lab,
        lambda folder, at: run(lab, folder, arrays(), at=at, backups=CHOSEN.items()),
        itertools.count().__next__,
        [(1, 0), (1, 0), (1, 5), (2, 0), (2, 5), (3, 0)],
        ((7, []), (14, [(1, 0), (1, 0), (1, 5)]), (22, [(2, 0), (2, 5)])),
    )
    for name, one in expected.items():
        lab.check(same(found[name], one), f"{name}: {found[name]} instead of {one}")
