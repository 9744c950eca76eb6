"""How many rows one device tries of a batch; the suites divide batches of all sizes."""

from kerasdist.input.sharding import spared


def test_one_device_tries_at_most_a_few_times_what_a_replica_has():
    assert spared((6, 6)) == (6, 6)
    assert spared((32, 32)) == (16, 16)
    assert spared((32,) * 64) == (2,) * 64
    assert spared((500, 1, 0)) == (166, 1, 0)
