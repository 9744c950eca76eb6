"""Reductions and options, as users give them."""

import enum

import pytest

from kerasdist.api.options import CommunicationImplementation, CommunicationOptions, ReduceOp


class Theirs(enum.Enum):
    """As TensorFlow's own."""

    SUM = "SUM"
    MEAN = "MEAN"


@pytest.mark.parametrize("given", ["SUM", "sum", "Sum", ReduceOp.SUM, Theirs.SUM])
def test_a_reduction_by_any_name(given):
    assert ReduceOp.of(given) is ReduceOp.SUM


@pytest.mark.parametrize("given", ["auto", "RING", "nccl", CommunicationImplementation.RING])
def test_an_implementation_by_any_name(given):
    made = CommunicationOptions(implementation=given).implementation
    assert isinstance(made, CommunicationImplementation)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": -1.0}, "timeout_seconds"),
        ({"bytes_per_pack": "64"}, "bytes_per_pack"),
        ({"timeout_seconds": "5"}, "timeout_seconds"),
        ({"implementation": "MPI"}, "implementation"),
        ({"implementation": 7}, "implementation"),
        ({"compression": "zip"}, "compression"),
    ],
)
def test_options_that_mean_nothing(options, name):
    with pytest.raises(ValueError, match=f"Expected {name} .*Received: {name}="):
        CommunicationOptions(**options)
