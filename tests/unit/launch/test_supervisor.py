"""What the guard of a worker does before it starts the worker."""

from __future__ import annotations

import pytest

from kerasdist.launch.supervisor import own_gpus


@pytest.mark.parametrize(
    ("visible", "share", "parts"),
    [
        ("0,1", 2, ["0", "1"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c", 2, ["GPU-a", "GPU-b"]),  # as many for each
        ("0,1", 1, [None]),  # one worker keeps what there is
        ("0", 2, [None, None]),  # too few: the strategy says so
        ("", 2, [None, None]),
        ("-1", 2, [None, None]),
    ],
)
def test_workers_divide_the_gpus_that_they_may_see(visible, share, parts):
    assert [own_gpus(visible, slot, share) for slot in range(share)] == parts


def test_workers_divide_the_gpus_of_the_machine_in_the_order_of_their_numbers(tmp_path):
    for name in ("nvidia0", "nvidia2", "nvidia10", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    parts = [own_gpus(None, slot, 2, str(tmp_path)) for slot in range(2)]
    assert parts == ["0,1", "2,10"]


def test_a_machine_without_gpus_leaves_things_as_they_are(tmp_path):
    assert own_gpus(None, 0, 2, str(tmp_path)) is None
