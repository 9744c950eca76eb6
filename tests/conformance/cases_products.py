"""Products of weights, and their transposes.

All axes are of one size, so that shapes would not tell an exchange of operands or axes.
"""

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.lazy import keras
from tests.conformance.models import compiled
from tests.conformance.registry import case

SIZE = 3
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


def products(first, second):
    for equation in EINSUMS:
        one, other = equation.partition("->")[0].split(",")
        yield keras.ops.einsum(equation, first[len(one)], second[len(other)])
    for one, other in MATMULS:
        yield keras.ops.matmul(first[one], second[other])


def build():
    """A model whose output is a sum of products of its weights, weighted by the input."""

    class Products(keras.layers.Layer):
        def build(self, shape):
            self.first, self.second = (
                [
                    self.add_weight((SIZE,) * rank, keras.initializers.RandomNormal(0.0, 0.7))
                    for rank in range(5)
                ]
                for _ in range(2)
            )

        def call(self, x):
            ops = keras.ops
            values = []
            for product in products(self.first, self.second):
                values += [product, ops.transpose(product), ops.swapaxes(product, -1, -2)]
            value = ops.tanh(ops.concatenate([ops.reshape(one, (-1,)) for one in values]))
            # Each element counts differently: another order of them is another sum.
            places = np.arange(3 * value.shape[0]).reshape(-1, 3)
            scale = np.cos(places * 1.7).astype("float32") / 100
            return ops.expand_dims(ops.matmul(x, ops.matmul(value, scale)), -1)

    inputs = keras.Input((3,))
    return compiled(keras.Model(inputs, Products()(inputs)), keras.optimizers.SGD(0.05), "mse")


@case("products", replicas=(2, 3))
def transposed(lab):
    """Products of weights by `einsum` and `matmul`, and their transposes."""
    data = np.random.default_rng(7)
    x = data.normal(size=(4, 3)).astype("float32")
    y = data.normal(size=(4, 1)).astype("float32")
    lab.same(build, fit(x, y, batch_size=4), strategy=lab.strategy(check="off"))
