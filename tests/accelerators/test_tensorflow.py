"""TensorFlow on devices that share no memory, as GPUs are: what the graphs of its steps hold."""

import json

import pytest

from tests.fresh import run_forked


@pytest.fixture(scope="module")
def found():
    code = "from tests.accelerators.tensorflow_graphs import main; main()"
    output = run_forked(code, "tensorflow")
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "optimizer", ["plain", "global_clipnorm", "clipnorm", "loss scale", "accumulation"]
)
def test_gradients_are_summed_by_one_collective_on_each_device(found, optimizer):
    on_first, on_second, added_up = found["sums_by_optimizer"][optimizer]
    assert (on_first, on_second) == (1, 1)
    assert added_up == 0


def test_statistics_are_summed_by_collectives_and_all_sums_of_gpus_by_nccl(found):
    collectives, added_up, hints = found["normalization"]
    assert collectives > 2
    assert added_up == 0
    assert hints == ["nccl"]


def test_packs_are_bounded_on_gpus_and_last_layers_go_first(found):
    assert found["packs"] == [[26], [20, 3, 3], [20, 5, 1]]  # on CPUs, as told, on GPUs


def test_pieces_wait_on_their_devices_and_other_batches_are_divided_on_the_host(found):
    assert found["prefetching"] == {
        "rows": [[2, 0], [2, 1]],
        "sizes": [[2, 2], [1, 1]],
        "taken": 2,
        # No device takes an error of the pipeline for the end of the data: the first one gets the
        # error, and the second waits for the first.
        "waits": [[], [0]],
        "divided": ["CPU:0"],
    }
    kinds = {"strings": False, "ragged": False, "integers": True, "followed": False}
    assert found["kinds_of_batches"] == kinds


def test_a_dataset_owns_the_functions_that_feed_devices(found):
    """A second epoch traces none, and none outlives the dataset."""
    again, at_first, outlive = found["retraced"]
    assert (again, outlive) == (0, 0)
    assert at_first == 3 * 2  # of each device


def test_pipelines_of_devices_are_not_tuned(found):
    for begun, is_tuned in found["pipelines"].values():
        assert begun >= 2
        assert not is_tuned
