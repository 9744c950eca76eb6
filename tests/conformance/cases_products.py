"""Products of weights, transposed and reshaped, at random: issue 28, point 7, DEFECTS 1.

An expression is a product of two weights and what is done to it: einsum with no, one or two batch
axes, matmul, transpose, swapaxes, reshape. Many have square operands, with which an exchange of
operands or axes would go unnoticed by shapes. 500 expressions are in 20 models; `make
test` takes some of them on TensorFlow, which traces each for every replica, and on JAX.
"""

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.compare import FLOAT32
from tests.conformance.lazy import keras
from tests.conformance.registry import case
from tests.environment import everything

MODELS, EXPRESSIONS, SIZE = 20, 25, 3
# Each letter is an axis. The first of two operands has the letters before the comma.
EINSUMS = (
    *("ij,jk->ik", "ij,jk->ki", "ij,kj->ik", "ji,jk->ik", "ij,ij->ij", "ij,ij->ji", "ij,ji->ij"),
    *("ij,ji->ji", "ij,ik->ijk", "ij,ik->ikj", "ij,jk->ijk", "ij,kj->jik", "ij,kl->ijkl"),
    *("bij,bjk->bik", "bij,bjk->bki", "bij,bkj->bik", "bij,bik->bjk", "bij,bij->bij"),
    *("bij,bij->ijb", "bij,jk->bik", "bij,jk->kbi", "ij,bjk->bik", "bij,cjk->bcik"),
    *("bij,bjk->ibk", "bij,bj->bi", "bi,bij->jb", "bi,bj->bij", "bi,bj->jib"),
    *("bcij,bcjk->bcik", "bcij,bcjk->cbki", "bcij,bckj->bcik", "bcij,bcij->bcij"),
    *("bcij,bcij->jicb", "bcij,cbjk->bcik", "bcij,bjk->bcik", "bcij,jk->kbci"),
)
MATMULS = ((2, 2), (3, 3), (4, 4), (3, 2), (2, 3), (4, 2), (4, 3), (2, 4))


def expression(draw):
    """Shapes of two weights, and a function of them; letters and sizes are drawn."""
    sizes = {letter: int(draw.choice((SIZE, SIZE, SIZE, 2, 4))) for letter in "bcijkl"}
    if draw.random() < 0.7:
        equation = str(draw.choice(EINSUMS))
        axes = equation.partition("->")[0].split(",")
        first, second = (tuple(sizes[letter] for letter in names) for names in axes)
        product = lambda a, b: keras.ops.einsum(equation, a, b)  # noqa: E731
    else:
        ranks = MATMULS[draw.integers(len(MATMULS))]
        batch = (sizes["b"], sizes["c"])
        first = (*batch[4 - ranks[0] :], sizes["i"], sizes["j"])
        second = (*batch[4 - ranks[1] :], sizes["j"], sizes["k"])
        product = keras.ops.matmul
    swaps, order = draw.random(3) < 0.3, draw.random(4)
    last = str(draw.choice(("transpose", "swapaxes", "permute", "reshape", "nothing")))

    def swapped(x, axes):
        return keras.ops.swapaxes(x, *axes) if len(x.shape) > 1 else x

    def evaluate(a, b):
        ops = keras.ops
        # Twice swapped, an operand is as before, by other operations.
        a, b = ops.convert_to_tensor(a), ops.convert_to_tensor(b)
        a, b = (
            swapped(ops.transpose(swapped(x, (-1, -2)), _back(x)), (0, 0)) if twice else x
            for x, twice in zip((a, b), swaps, strict=False)
        )
        x = product(a, b)
        rank = len(x.shape)
        if last == "transpose":
            x = ops.transpose(x)
        elif last == "swapaxes":
            x = swapped(x, (-1, -2))
        elif last == "permute":
            x = ops.transpose(x, np.argsort(order[:rank]).tolist())
        elif last == "reshape":
            x = ops.reshape(x, (x.shape[-1], -1))
        return ops.transpose(x) if swaps[2] else x

    return first, second, evaluate


def _back(x):
    """The axes that undo a swap of the last two."""
    axes = list(range(len(x.shape)))
    return axes[:-2] + axes[:-3:-1]


def build(number):
    """A model whose output is a sum of expressions of its weights, weighted by the input."""
    draw = np.random.default_rng([28, 7, number])
    made = [expression(draw) for _ in range(EXPRESSIONS)]

    class Products(keras.layers.Layer):
        def build(self, shape):
            normal = keras.initializers.RandomNormal
            # Expressions share weights: two of each shape.
            shapes = sorted({one for *two, _ in made for one in two})
            self.pool = {
                (shape, k): self.add_weight(
                    shape=shape, initializer=normal(0.0, 0.7, seed=2 * index + k)
                )
                for index, shape in enumerate(shapes)
                for k in (0, 1)
            }

        def call(self, x):
            ops = keras.ops
            values = [
                ops.reshape(evaluate(self.pool[first, 0], self.pool[second, 1]), (-1,))
                for first, second, evaluate in made
            ]
            value = ops.tanh(ops.concatenate(values))
            # Each element counts differently: another order of them is another sum.
            places = np.arange(3 * value.shape[0]).reshape(-1, 3)
            scale = np.cos(places * 1.7).astype("float32") / EXPRESSIONS
            return ops.expand_dims(ops.matmul(x, ops.matmul(value, scale)), -1)

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Products()(inputs))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@case("products", replicas=(2, 3), name="at_random", title="500 products of weights, at random")
def at_random(lab):
    data = np.random.default_rng(7)
    x = data.normal(size=(4, 3)).astype("float32")
    y = data.normal(size=(4, 1)).astype("float32")
    few = {} if everything() else {"tensorflow": 1, "jax": 1}
    for number in range(few.get(lab.backend, MODELS)):
        lab.same(
            lambda number=number: build(number),
            fit(x, y, batch_size=4),
            strategy=lab.strategy(check="off"),  # of a batch, which mixes nothing here
            tolerance=FLOAT32,
        )
