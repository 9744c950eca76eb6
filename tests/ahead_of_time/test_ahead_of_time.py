"""What XLA makes of `fit` for accelerators that are not here. All programs: `make ahead-of-time`.

A state that is not donated takes its memory twice; a collective too many costs each step of a real
job, and no test on CPU devices shows it.
"""

import json
import re
from pathlib import Path

import pytest

from tests.ahead_of_time.processes import run_with_compilers
from tests.environment import everything

PROGRAMS = Path(__file__).with_name("programs.py")
EVERYTHING = everything()
SECONDS = 1500 if EVERYTHING else 600

ONE_SUM = {"all-reduce": 1}
# Per BatchNormalization one for the moments and one for their gradients.
NORMALIZED = {"all-gather": 2, "all-reduce": 3}
# By program: the collectives of one step; and where a platform has others.
BOTH: dict[str, dict[str, int]] = {
    "mlp": ONE_SUM,
    "mlp, uneven batch": ONE_SUM,
    "mlp, clipnorm": ONE_SUM,
    "mlp, 2 logical devices": {"all-reduce": 5, "all-gather": 3, "reduce-scatter": 2},
    # Gradients are scattered, and weights gathered: the new ones, or where layers use them.
    "mlp, optimizer sharded": {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1},
    "mlp, all sharded": {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1},
    "convolutions with BatchNormalization": NORMALIZED,
    "transformer in bfloat16": {"all-reduce": 2},  # float32 and bfloat16
    "LSTM": ONE_SUM,
}
ON_TPU = {
    "mlp, 2 logical devices": {"all-reduce": 5, "all-gather": 10, "reduce-scatter": 2},
    "mlp, optimizer sharded": {"reduce-scatter": 1, "all-gather": 3, "all-reduce": 1},
    "mlp, all sharded": {"reduce-scatter": 1, "all-gather": 3, "all-reduce": 1},
}
EXPECTED = {"tpu": BOTH | ON_TPU, "gpu": BOTH}
# A batch that is divided unevenly, and variables that are divided; for GPUs: `test_golden`.
SELECTED = {"tpu": ["mlp, uneven batch", "mlp, all sharded"]}
CHOSEN = {one: list(EXPECTED[one]) for one in EXPECTED} if EVERYTHING else SELECTED


@pytest.fixture(scope="module")
def compiled():
    """Per platform what each program has become, in a fresh process."""
    known: dict[str, dict[str, dict]] = {}

    def of(platform):
        if platform not in known:
            known[platform] = run(platform, CHOSEN[platform])
        return known[platform]

    return of


def test_every_program_is_expected():
    names = re.findall(r'^    "([^"]+)": Program\(', PROGRAMS.read_text("utf-8"), re.MULTILINE)
    assert names
    assert all(list(one) == names for one in EXPECTED.values())


def run(platform, names):
    output = run_with_compilers(
        ["tests.ahead_of_time.programs", platform, *names],
        seconds=SECONDS,
        KERAS_BACKEND="jax",
        JAX_PLATFORMS="cpu",  # what computes; compiled is for what is described
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # another test may compile at the same time
        XLA_FLAGS="--xla_gpu_autotune_level=0",
    )
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    ("platform", "name"), [(platform, name) for platform in CHOSEN for name in CHOSEN[platform]]
)
def test_state_is_donated_and_collectives_are_few(compiled, platform, name):
    found = compiled(platform)[name]
    assert found["donated"] == found["arrays"] > 0
    assert found["collectives"] == EXPECTED[platform][name]
