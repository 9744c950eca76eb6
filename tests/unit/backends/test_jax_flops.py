"""`matmul_flops` counts cuDNN's own operations, which Keras takes on GPUs, as XLA's products."""

from tests.fresh import run_forked

ATTENTION = """
from unittest import mock
import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from kerasdist.backends.jax.backend import matmul_flops

query, key = jnp.zeros((2, 16, 3, 64), "bfloat16"), jnp.zeros((2, 24, 3, 64), "bfloat16")

def flops(implementation):
    def attend(query, key):
        return jax.nn.dot_product_attention(query, key, key, implementation=implementation)
    return dict(matmul_flops(jax.make_jaxpr(attend)(query, key)))

with (  # it is traced, not run: the checks of the GPU are all that stands in the way
    mock.patch.object(cudnn, "check_cudnn_version", lambda: 91_300),
    mock.patch.object(cudnn, "check_compute_capability", lambda *_: True),
):
    print(flops("cudnn"), flops("xla"))
"""

LSTM = """
from unittest import mock
import jax
import jax.numpy as jnp
from jax.experimental import rnn
from jaxlib import gpu_rnn
from kerasdist.backends.jax.backend import matmul_flops

batch, length, size, width = 2, 5, 4, 3

def run(inputs, state, weights, lengths):
    return rnn.lstm(inputs, state, state, weights, lengths, size, width, 1, 0.0, False)

given = (
    jnp.zeros((batch, length, size)),
    jnp.zeros((1, batch, width)),
    jnp.zeros(rnn.get_num_params_in_lstm(size, width, 1, False)),
    jnp.full(batch, length, "int32"),
)
name = "compute_rnn_workspace_reserve_space_sizes"
with mock.patch.object(gpu_rnn, name, lambda *_: (0, 0), create=True):
    print(dict(matmul_flops(jax.make_jaxpr(run)(*given))))
"""


def test_attention_is_counted_as_xla_s_is():
    said = run_forked(ATTENTION, "jax").splitlines()[-1]
    flops = 2 * (2 * 2 * 3 * 16 * 24 * 64)  # scores, and values by their weights
    assert said == f"{{'bfloat16': {flops}}} {{'bfloat16': {flops}}}"


def test_an_lstm_has_four_gates():
    said = run_forked(LSTM, "jax").splitlines()[-1]
    assert said == f"{{'float32': {2 * 2 * 5 * 4 * 3 * (4 + 3)}}}"
