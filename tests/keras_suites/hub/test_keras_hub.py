"""KerasHub's models and KerasTuner's search under a strategy equal those of plain Keras."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests import environment
from tests.docs.__main__ import MARK
from tests.docs.blocks import all_blocks, blocks_of
from tests.fresh import ROOT, run_python

PACKAGES = Path(sys.prefix) / "keras-hub"
BACKENDS = ("tensorflow", "jax", "torch")
CASES = ("text_classifier", "lora", "causal_lm", "mixture_of_experts", "random_search")
SECONDS = 1500
# Sums of float32 in another order, through a few steps: 7e-7 was seen. Adam divides by gradients
# that may be nearly nothing, so that LoRA's differ by more than the others'.
RELATIVE, ABSOLUTE = 1e-5, 1e-5


@pytest.fixture(scope="module")
def results():
    """Per backend what each case gave, plain and distributed, in one process."""
    known = {}

    def of(backend):
        if backend not in known:
            output = run_python(
                "-m",
                "tests.keras_suites.hub.script",
                seconds=SECONDS,
                KERAS_BACKEND=backend,
                **environment.values(environment.suite_settings(backend)),
                PYTHONPATH=os.pathsep.join([str(ROOT), str(PACKAGES)]),
            )
            known[backend] = json.loads(output.splitlines()[-1])
        return known[backend]

    return of


def differences(plain, ours, path=""):
    """Where two results differ, as paths with both values."""
    if isinstance(plain, dict) and isinstance(ours, dict) and plain.keys() == ours.keys():
        pairs = [(f"{path}/{key}", plain[key], ours[key]) for key in plain]
    elif isinstance(plain, list) and isinstance(ours, list) and len(plain) == len(ours):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(plain, ours, strict=True))]
    elif isinstance(plain, float) and isinstance(ours, float):
        close = math.isclose(plain, ours, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return [] if close else [(path, plain, ours)]
    else:
        return [] if plain == ours else [(path, plain, ours)]
    return [found for where, *both in pairs for found in differences(*both, where)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_plain_keras(results, backend, case):
    plain, ours = results(backend)[case]
    assert "error" not in plain, plain["error"]
    assert "error" not in ours, ours["error"]
    assert not differences(plain, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "backend"),
    sorted({(one.page, backend) for one in all_blocks() for backend in one.with_keras_hub}),
)
def test_a_page_whose_blocks_need_keras_hub(page, backend):
    output = run_python(
        "-m",
        "tests.docs",
        page,
        seconds=SECONDS,
        **environment.values(environment.CPU_DEVICES),
        KERAS_BACKEND=backend,
        KERASDIST_CPU_DEVICES="4",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(PACKAGES)]),
    )
    result = json.loads(output.splitlines()[-1].removeprefix(MARK))
    here = [one for one in blocks_of(page) if backend in (*one.backends, *one.with_keras_hub)]
    assert (result["blocks"], result["error"]) == (len(here), None), result["error"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_own_map_on_torch_workers(workers):
    """Gemma by its class's map: tensor parallelism by DTensor, with the batch over the replicas."""
    output = run_python(
        *("-m", "kerasdist", "run", "--workers", str(workers)),
        "tests/keras_suites/hub/layout_script.py",
        seconds=SECONDS,
        KERAS_BACKEND="torch",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(PACKAGES)]),
    )
    line = next(one for one in output.splitlines() if '"replicas"' in one)
    facts, end = json.JSONDecoder().raw_decode(line[line.index("{") :])
    assert facts == {"replicas": workers // 2, "divided": facts["divided"]}
    assert facts["divided"] >= 3 * 14  # the weights of two blocks and the table, and their slots
    assert float(line[line.index("{") :][end:]) < ABSOLUTE
