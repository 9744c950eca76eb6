"""What a step sends and holds on 8 to 4,096 GPUs is what the files in `golden/` say.

If a change is meant, `python -m tests.ahead_of_time.golden --write` writes them anew.
"""

import itertools
import math

import pytest

from tests.ahead_of_time import golden
from tests.ahead_of_time.golden import MODELS, NAMES, SHARDINGS, TARGETS
from tests.environment import everything

# Of few devices also how their moments are gathered.
SOME = {min(TARGETS): ["normalized-replicated"], max(TARGETS): NAMES}
CHOSEN = dict.fromkeys(TARGETS, NAMES) if everything() else SOME
COUNTS = [count for count, names in CHOSEN.items() if names == NAMES]
INPUTS, UNITS, CLASSES = 128, 4096, 8
# Elements of the variables; those that are large enough are divided.
SHAPES = {
    "wide": [(INPUTS, UNITS), (UNITS,), (UNITS, CLASSES), (CLASSES,)],
    "normalized": [(INPUTS, UNITS), (UNITS,), (UNITS,), (UNITS, CLASSES), (CLASSES,)],
}
SIZES = {name: [math.prod(one) for one in shapes] for name, shapes in SHAPES.items()}
FLOAT = 4
# The sums of the loss and of the metric, and their counts.
LOGS = 64
# Moments of more replicas are summed twice, not gathered (`batch_norm.MOST_GATHERED`).
MOST_GATHERED = 64


@pytest.fixture(scope="module")
def found():
    return golden.compiled_for(CHOSEN)


def test_each_program_has_a_file_of_all_numbers_of_devices():
    assert sorted(one.name for one in golden.FOLDER.iterdir()) == sorted(
        f"{name}.txt" for name in NAMES
    )
    assert all(list(golden.known(name)) == list(TARGETS) for name in NAMES)


@pytest.mark.timeout(golden.SECONDS)
@pytest.mark.parametrize(
    ("count", "name"), [(count, name) for count, names in CHOSEN.items() for name in names]
)
def test_a_step_sends_and_holds_what_the_file_says(found, count, name):
    assert golden.block(count, found[count][name]) == golden.known(name)[count]


def sent(facts, kind):
    return [size for one, size, _ in facts["sent"] if one == kind]


@pytest.mark.parametrize(("count", "model"), list(itertools.product(COUNTS, MODELS)))
def test_gradients_are_summed_once(found, count, model):
    """Replicated: in as many messages on 4,096 devices as on 8."""
    facts = found[count][f"{model}-replicated"]
    gathered, summed = moments(count) if model == "normalized" else ([], [])
    least = FLOAT * sum(SIZES[model]) + sum(summed)
    assert least < sum(sent(facts, "all-reduce")) <= least + LOGS
    assert len(sent(facts, "all-reduce")) == {"wide": 1, "normalized": 2}[model] + len(summed)
    assert sent(facts, "all-gather") == gathered
    assert {devices for *_, devices in facts["sent"]} == {count}


def moments(count):
    """Bytes of what brings the devices' means and squared deviations together: gathers, sums."""
    each = UNITS * FLOAT
    return ([count * 2 * each], []) if count <= MOST_GATHERED else ([], [each, each])


@pytest.mark.parametrize(("count", "sharding"), list(itertools.product(COUNTS, SHARDINGS[1:])))
def test_sharded_state_is_scattered_and_gathered_once(found, count, sharding):
    facts = found[count][f"wide-{sharding}"]
    *large, last = SIZES["wide"]
    assert sent(facts, "reduce-scatter") == [FLOAT * sum(large)]
    assert sent(facts, "all-gather") == [FLOAT * sum(large)]
    assert 0 < sum(sent(facts, "all-reduce")) <= FLOAT * last + LOGS
    assert len(facts["sent"]) == 3


@pytest.mark.parametrize(("count", "model"), list(itertools.product(COUNTS, MODELS)))
def test_a_device_holds_its_part(found, count, model):
    *large, last = SIZES[model]
    whole, part = FLOAT * (sum(large) + last), FLOAT * (sum(large) // count + last)
    for sharding in SHARDINGS:
        held = found[count][f"{model}-{sharding}"]["held"]
        assert held["trainable"] == (part if sharding == "full" else whole)
        slots = whole if sharding == "replicated" else part
        assert held["optimizer"] == 2 * slots + 8  # Adam's step and learning rate


# With sharded slots XLA makes the two sums from scatters and gathers.
MORE = {"normalized-replicated": 1, "normalized-optimizer": 2, "normalized-full": 1}


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_collectives_is_that_of_a_small_job(name):
    """But for the second sum of the moments of many devices."""
    totals = {
        count: sum(int(line.split()[1]) for line in text.splitlines() if " x " in line)
        for count, text in golden.known(name).items()
    }
    few = totals[min(TARGETS)]
    assert totals == {
        count: few + (MORE.get(name, 0) if count > MOST_GATHERED else 0) for count in TARGETS
    }
