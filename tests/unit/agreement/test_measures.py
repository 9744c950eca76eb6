"""Whether weights of workers differ by rounding or by more, and whether checksums see an order."""

import numpy as np
import pytest

from kerasdist.agreement.results import checksum_of, difference, measures_of, rounding_of
from tests.environment import everything
from tests.fresh import run_forked

DRAWS = np.random.default_rng(0).standard_normal(100_000, dtype="float32")


def apart(one, other):
    between = difference(measures_of(one), measures_of(other))
    return between > rounding_of(one.dtype.name)


def weights(count):
    """Glorot's weights: normal draws, in another order in each stretch."""
    stretches = [np.roll(DRAWS, 7 * number) for number in range(-(-count // DRAWS.size))]
    return np.concatenate(stretches)[:count] * np.float32(0.05)


@pytest.mark.parametrize("count", [100, 1_000, 10_000, 1_000_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_is_no_rounding_whatever_the_size(count, dtype):
    kernel = weights(count).astype(dtype)
    noise = 1e-3 * np.float32(0.05) * np.random.default_rng(count).standard_normal(count, "float32")
    assert apart(kernel, kernel + noise.astype(dtype))
    # Some roundings of each element in each of 1,000 steps: their squares add up.
    draws = np.random.default_rng(1).standard_normal(count, "float32").astype(dtype)
    rounding = kernel * np.finfo(dtype).eps * np.sqrt(1000, dtype=dtype) * draws
    assert not apart(kernel, kernel + rounding)
    assert not np.array_equal(kernel, kernel + rounding)


def test_a_change_in_one_of_seven_of_many_weights():
    """A hundred million are 400 MB, whose measures add up block by block."""
    kernel = np.resize(DRAWS * np.float32(0.05), 100_000_000 if everything() else 10_000_000)
    other = kernel.copy()
    other[::7] *= np.float32(1.01)
    assert apart(kernel, other)


def test_sixteen_bits_one_rounding_is_a_thousandth():
    kernel = weights(10_000).astype("float16")
    flips = np.random.default_rng(0).integers(-1, 2, kernel.size)  # of the last bit
    assert not apart(kernel, (kernel.view("int16") + flips.astype("int16")).view("float16"))
    assert apart(kernel, (kernel * np.float16(1.05)).astype("float16"))


def test_nearly_constant_small_whole_and_infinite_values():
    scales = np.ones(1000, "float32")
    assert not apart(scales, scales + np.float32(1e-6))
    assert apart(scales, scales + np.float32(1e-3))
    assert not apart(scales * 0, scales * 1e-12)  # rounding around zero
    assert apart(np.array(100_000), np.array(100_001))
    assert apart(scales, np.where(np.arange(1000) == 5, np.nan, scales).astype("float32"))
    assert not apart(scales * np.float32(np.inf), scales * np.float32(np.inf))


def test_checksums_see_the_order_of_elements():
    for array in (np.arange(10.0), np.eye(3, dtype="float32"), np.array([True, False])):
        assert checksum_of(array) == checksum_of(array.copy())
        assert checksum_of(array) != checksum_of(array[::-1].copy())
    columns = np.arange(12.0).reshape(3, 4)
    assert checksum_of(columns.T) == checksum_of(np.ascontiguousarray(columns.T))


ON_A_DEVICE = """
import numpy as np, keras
from keras import ops
{checksum}
def told(array, dtype):
    return int(of(ops.cast(ops.convert_to_tensor(array), dtype)))
base = np.arange(2000) % 1000 - 3
swapped = base.copy()
swapped[[7, 258]] = swapped[[258, 7]]  # 251 places apart
for dtype in {dtypes}:
    one, two = told(base, dtype), told(base.copy(), dtype)
    others = [told(other, dtype) for other in (swapped, np.roll(base, 1), base[::-1].copy())]
    assert one == two, dtype
    assert len({{one, *others}}) == 4, dtype
print("seen")
"""


@pytest.mark.parametrize(
    ("backend", "checksum", "dtypes"),
    [
        (
            "torch",
            "from kerasdist.backends.torch.replica.replicas import checksum_on_device as of",
            ("float32", "float64", "float16", "bfloat16", "int64", "int8"),
        ),
        (
            "jax",
            "from kerasdist.backends.jax.mesh.worker_placement import _sum_of_bits as of",
            ("float32", "float16", "bfloat16", "int32", "int8"),
        ),
    ],
)
def test_so_do_those_on_devices(backend, checksum, dtypes):
    code = ON_A_DEVICE.format(checksum=checksum, dtypes=dtypes)
    assert run_forked(code, backend).splitlines()[-1] == "seen"
