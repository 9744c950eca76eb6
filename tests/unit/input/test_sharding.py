"""How many rows one device tries of a batch; the suites divide batches of all sizes."""

from kerasdist.input.sharding import trial_sizes


def test_one_device_tries_at_most_a_few_times_what_a_replica_has():
    assert trial_sizes((6, 6)) + trial_sizes((6, 5)) == (3, 3, 6, 5)
    assert trial_sizes((32, 32)) == (16, 16)
    assert trial_sizes((32,) * 64) == (2,) * 64
    assert trial_sizes((500, 1, 0)) == (166, 1, 0)
