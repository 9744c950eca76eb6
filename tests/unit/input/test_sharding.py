"""How many rows one device tries of a batch; the suites divide batches of all sizes."""

from kerasdist.input.sharding import trial_sizes


def test_one_device_tries_what_a_replica_has_of_even_batches_and_a_few_times_that_of_others():
    assert trial_sizes((32, 32)) + trial_sizes((6, 6)) + trial_sizes((6, 5)) == (16, 16, 3, 3, 6, 5)
    assert trial_sizes((32,) * 64) == (2,) * 64
    assert trial_sizes((500, 1, 0)) == (166, 1, 0)
