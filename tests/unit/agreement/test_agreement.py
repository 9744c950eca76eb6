"""What workers say of a model and of a call: the edges that no case of disagreements reaches."""

import functools
import json
from typing import Any

import keras
import numpy as np
import pytest

from kerasdist import keras_compat
from kerasdist.agreement import description
from kerasdist.agreement.description import configuration, described, of_array
from kerasdist.job.comparison import described_difference, digest


def difference(one, other) -> Any:
    return None if digest(one) == digest(other) else described_difference([one, other])


def of_model(*layers):
    return description.facts_of(keras.Sequential(layers), anew=True)


class Own(keras.layers.Layer):
    """A layer that Keras cannot write down."""

    def __init__(self, function, factor=1.0):
        super().__init__()
        self.function, self.factor, self.rank = function, factor, id(self)

    def call(self, inputs):
        return self.function(inputs) * self.factor + self.rank * 0


def functional(swapped=False):
    inputs = keras.Input((4,))
    one = keras.layers.Dense(4)(inputs)
    two = keras.layers.Dense(4)(one)
    pair = [two, one] if swapped else [one, two]
    model = keras.Model(inputs, keras.layers.Concatenate()(pair) * 2.0)
    return description.facts_of(model, anew=True)


def test_another_wiring_is_found():
    assert difference(functional(), functional()) is None
    assert difference(functional(), functional(swapped=True)).startswith("wiring[0]")


def test_what_the_user_wrote_is_found():
    base = of_model(Own(lambda x: x + 1))
    assert difference(base, of_model(Own(lambda x: x + 1))) is None
    frozen = Own(lambda x: x + 1)
    frozen.trainable = False
    for other, said in (
        (Own(lambda x: x + 2), "layers[0].function.code="),
        (Own(lambda x: x + 1, 2.0), "layers[0].factor=2.0 on worker 1, 1.0 on worker 0"),
        (frozen, "layers[0].trainable=False"),
    ):
        assert difference(base, of_model(other)).startswith(said)


def test_closures_and_globals_count_but_not_what_a_worker_is():
    def made(alpha, rank):
        def loss(y, p):
            return alpha * (y - p) + rank

        return loss

    assert difference(described(made(0.5, 0)), described(made(0.5, 1))) is None
    said = difference(described(made(0.5, 0)), described(made(0.1, 0)))
    assert said == "uses.alpha=0.1 on worker 1, 0.5 on worker 0"
    partial = functools.partial(made, alpha=0.5)
    assert difference(described(partial), described(functools.partial(made, alpha=1))) is not None


def test_addresses_and_the_order_of_sets_are_no_difference():
    text = repr(object())
    assert "0x" in text
    assert "0x" not in described(text)
    assert described({"b", "a", "c"}) == ["a", "b", "c"]
    assert json.dumps(described([float("nan"), np.float32(0.5), np.int64(3), b"x", None, True]))


def test_arrays_are_known_by_their_rows():
    x = np.arange(4000.0).reshape(1000, 4)
    for row in (0, 10, 500, 998):  # Not six of them alone
        other = x.copy()
        other[row, 2] += 1
        assert difference(of_array(x), of_array(other)) is not None
    assert of_array(np.asfortranarray(x)) == of_array(x)
    assert of_array(np.array(1.0)) != of_array(np.array(2.0))
    words = np.array(["a", "b"], object)
    assert of_array(words) != of_array(words[::-1])


def test_blocks_all_over_a_larger_array_are_compared(monkeypatch):
    monkeypatch.setattr(description, "_BLOCK", 32)
    monkeypatch.setattr(description, "_MOST", 3 * 32)
    x = np.arange(400.0).reshape(100, 4)
    seen = []
    for row in range(100):
        other = x.copy()
        other[row] += 1
        seen += [row] if of_array(other) != of_array(x) else []
    assert len(seen) == 3
    assert (seen[0], seen[-1]) == (0, 99)


class Timed(keras.Model):
    """A model that has a path and a time of its own, and a factor that it computes with."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.started, self.out = factor, id(self), f"/tmp/{id(self)}"

    def call(self, inputs):
        return self.scaled(inputs)

    def scaled(self, inputs):
        return inputs * self.factor

    def report(self):
        return self.started, self.out


def test_only_what_a_model_computes_with_counts():
    one, other, twice = (
        description.facts_of(Timed(factor), anew=True) for factor in (1.0, 1.0, 2.0)
    )
    assert difference(one, other) is None
    assert difference(one, twice).startswith("factor=2.0 on worker 1, 1.0 on worker 0")


def test_what_cannot_be_looked_at_is_known_by_its_class():
    class Odd:
        @property
        def shape(self):
            raise RuntimeError("not now")

    endless = []
    endless.append(endless)
    assert described(Odd()) == "Odd"
    assert json.dumps(described({"a": endless}))


_LAYERS = (
    (keras.layers.Dense, (2,), {"activity_regularizer": "l2"}),
    (keras.layers.Dense, (2,), {"dtype": "mixed_float16"}),
    # Keras does not name it among the arguments.
    (keras.layers.LayerNormalization, (), {"rms_scaling": True}),
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # rms_scaling
@pytest.mark.parametrize(("kind", "arguments", "changed"), _LAYERS)
def test_each_argument_of_a_layer_is_compared(kind, arguments, changed):
    one, again, other = kind(*arguments), kind(*arguments), kind(*arguments, **changed)
    assert difference(configuration(one), configuration(again)) is None
    assert difference(configuration(one), configuration(other)) is not None


class Held:
    """A user's object that holds an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_optimizers_are_found_wherever_a_model_holds_them(changed):
    def facts(momentums):
        model = keras.Sequential([keras.layers.Dense(1)])
        made = [keras.optimizers.SGD(momentum=momentum) for momentum in momentums]
        model._judge, model.all, model.held = made[0], {"a": {"b": [made[1]]}}, Held(made[2])
        assert keras_compat.optimizers_of(model) == made
        return description.facts_of(model, anew=True)

    before, after = [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]
    after[changed] = 0.9
    assert difference(facts(before), facts(before)) is None
    said = difference(facts(before), facts(after))
    assert said.startswith(f"optimizers[{changed}].momentum=0.9")


def test_a_model_that_is_built_by_its_data_is_one_for_any_number_of_rows():
    one, other, else_ = (
        keras.layers.InputLayer(batch_shape=shape) for shape in ((5, 6), (4, 6), (4, 7))
    )
    assert difference(configuration(one), configuration(other)) is None
    assert difference(configuration(one), configuration(else_)) is not None
