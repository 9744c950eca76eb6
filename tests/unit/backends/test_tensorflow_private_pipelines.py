"""Tripwires: what kerasdist touches of ``tf.data``'s private parts is where it should be.

A failure here means that TensorFlow moved something, and
`kerasdist/backends/tensorflow/private/pipelines.py` is the file to mend.
"""

import json

import pytest

from tests.fresh import run_fresh

PROBE = """
import json

import tensorflow as tf
from kerasdist.backends.tensorflow.private import pipelines

def numpy(value):
    return tf.numpy_function(lambda value: value, [value], tf.int64)

numbers = tf.data.Dataset.range(4)
variant = tf.data.experimental.to_variant(numbers)
pairs = tf.data.Dataset.zip((numbers, numbers))
pure = [numbers, numbers.map(lambda n: n + 1).batch(2).prefetch(1), pairs]
python = [
    numbers.map(numpy).batch(2),
    numbers.map(lambda n: tf.cond(n > 1, lambda: numpy(n), lambda: n)).shuffle(2).repeat(2),
    numbers.interleave(lambda n: tf.data.Dataset.range(n).map(numpy)),
    tf.data.Dataset.zip((numbers, numbers.map(numpy))),
    tf.data.Dataset.from_generator(lambda: [1], output_signature=tf.TensorSpec(())),
    tf.data.experimental.from_variant(variant, numbers.element_spec),
]

def begun(iterator):
    return "_iterator_resource" in vars(iterator)

def late(size=3):
    return pipelines.LateIterator(tf.data.Dataset.range(size))

@tf.function
def step(iterator):
    return iterator.get_next()

@tf.function
def optional_step(iterator):
    optional = iterator.get_next_as_optional()
    return optional.has_value()

unasked = late()
about = [unasked.element_spec == tf.TensorSpec([], tf.int64), isinstance(unasked, tf.data.Iterator)]
about.append(begun(unasked))
compiled = late()
in_function = [int(step(compiled)), int(step(compiled)), int(next(compiled)), next(compiled, None)]
traced = step.experimental_get_tracing_count()
step(iter(tf.data.Dataset.range(3)))
traced = [traced, step.experimental_get_tracing_count()]
try:
    step(compiled)
    at_the_end = None
except tf.errors.OutOfRangeError as error:
    at_the_end = type(error).__name__
optionals = late(1)
optionals = [bool(optional_step(optionals)), bool(optional_step(optionals))]
closed_over = late()
closing = tf.function(lambda: closed_over.get_next())
closing = [int(closing()), int(closing()), int(next(closed_over))]

print(json.dumps({
    "calls_python": [[pipelines.calls_python(one) for one in some] for some in (pure, python)],
    "about": about,
    "in_function": in_function,
    "traced": traced,
    "at_the_end": at_the_end,
    "optionals": optionals,
    "closing": closing,
}))
"""


@pytest.fixture(scope="module")
def probe():
    return json.loads(run_fresh(PROBE, KERAS_BACKEND="tensorflow").splitlines()[-1])


def test_pipelines_that_call_python_are_known(probe):
    assert probe["calls_python"] == [[False] * 3, [True] * 6]


def test_a_late_iterator_is_one_of_tensorflows_that_has_not_begun(probe):
    assert probe["about"] == [True, True, False]


def test_a_late_iterator_begins_when_it_is_asked(probe):
    assert probe["in_function"] == [0, 1, 2, None]
    assert probe["at_the_end"] == "OutOfRangeError"
    assert probe["optionals"] == [True, False]


def test_a_late_iterator_is_no_reason_to_trace_anew(probe):
    assert probe["traced"] == [1, 1]


def test_a_late_iterator_begins_outside_of_the_function_that_closes_over_it(probe):
    assert probe["closing"] == [0, 1, 2]
