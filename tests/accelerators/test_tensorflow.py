"""TensorFlow on devices that share no memory, as GPUs are: what the graphs of its steps hold."""

import json

import pytest

from tests.fresh import run_python


@pytest.fixture(scope="module")
def found():
    output = run_python(
        "-m", "tests.accelerators.tensorflow_graphs", seconds=600, KERAS_BACKEND="tensorflow"
    )
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "optimizer", ["plain", "global_clipnorm", "clipnorm", "loss scale", "accumulation"]
)
def test_gradients_are_summed_by_one_collective_on_each_device(found, optimizer):
    on_first, on_second, added_up = found["sums_by_optimizer"][optimizer]
    assert (on_first, on_second) == (1, 1)
    assert added_up == 0


def test_each_device_clips_its_own_copy(found):
    assert found["clipping_devices"] == [0, 1]


def test_statistics_of_batches_are_summed_by_collectives(found):
    collectives, added_up = found["normalization"]
    assert collectives > 2
    assert added_up == 0


def test_all_sums_between_gpus_ask_for_nccl(found):
    assert found["hints"] == ["nccl"]


def test_packs_are_bounded_on_gpus_and_last_layers_go_first(found):
    on_cpus, told, on_gpus = found["packs"]
    assert on_cpus == [26]
    assert told == [20, 3, 3]
    assert on_gpus == [20, 5, 1]


def test_pieces_wait_on_their_devices(found):
    assert found["prefetching"]["rows"] == [[2, 0], [2, 1]]
    assert found["prefetching"]["sizes"] == [[2, 2], [1, 1]]
    assert found["prefetching"]["taken"] == 2


def test_no_device_takes_an_error_of_the_pipeline_for_the_end_of_the_data(found):
    """The first device gets the error, and the second waits for the first one."""
    assert found["prefetching"]["waits"] == [[], [0]]


def test_other_batches_are_divided_on_the_host(found):
    assert found["prefetching"]["divided"] == ["CPU:0"]


def test_what_waits_on_devices(found):
    assert found["kinds_of_batches"] == {
        "strings": False,
        "ragged": False,
        "integers": True,
        "followed": False,
    }


def test_a_dataset_owns_the_functions_that_feed_devices(found):
    """A second epoch traces none, and none outlives the dataset (DEFECTS 13's like)."""
    again, at_first, outlive = found["retraced"]
    assert (again, outlive) == (0, 0)
    assert at_first == 4


def test_pipelines_of_devices_are_not_tuned(found):
    for begun, is_tuned in found["pipelines"].values():
        assert begun >= 2
        assert not is_tuned
