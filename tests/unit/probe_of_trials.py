"""What `test_keras_compat.py` looks at of ``keras_compat/trials.py``, in its fresh processes."""

TRIALS = """
from kerasdist.keras_compat import trials as seam

tried = keras.Sequential([
    keras.Input((2,)),
    keras.layers.Dense(1, name="dense", activity_regularizer="l2"),
    keras.layers.Dropout(0.5, seed=1, name="dropout"),
    keras.layers.GaussianNoise(0.5, seed=2, name="noise"),
])
tried.compile("sgd", "mae", metrics=["mae"], weighted_metrics=["mse"])
drawn, called = [], []

def drawn_once(name, draw, given):
    drawn.append(name)
    return given if name in seam.RESHUFFLING else draw()

tried.layers[0].add_loss(keras.ops.ones(()))
ones = keras.ops.ones((2, 2))
with (
    keras_compat.draws_replaced(drawn_once),
    keras_compat.layer_calls_recorded(lambda layer, out: called.append([layer.name, len(out)])),
    keras_compat.added_losses_kept(tried.layers),
):
    tried(ones, training=True)
    tried.layers[0].add_loss(keras.ops.ones(()))
    by_layers = sorted(drawn)
    arguments = {
        "beta": [(2,), 1.0, 1.0], "binomial": [(2,), 3.0, 0.5], "categorical": [ones, 1],
        "gamma": [(2,), 1.0], "normal": [(2,)], "randint": [(2,), 0, 3],
        "truncated_normal": [(2,)], "uniform": [(2,)], "dropout": [ones, 0.5], "shuffle": [ones],
    }
    public = {}
    for name, given in arguments.items():
        before = len(drawn)
        getattr(keras.random, name)(*given, seed=3)
        public[name] = name in drawn[before:]
after = len(drawn)
keras.random.normal((2,))
trials = {
    "by layers": by_layers,
    "public": sorted(public) == sorted([*seam.DRAWING, *seam.RESHUFFLING])
        and all(public.values()),
    "undone": [after == len(drawn), len(called)],
    "called": called,
    "losses": len(tried.layers[0]._get_own_losses()),
    "compiled": [keras_compat.compiled_losses(tried), keras_compat.compiled_metrics(tried)],
    "logs": keras_compat.numbers_of({"loss": keras.ops.ones(())}),
    "batch": [
        None if one is None else list(one.shape)
        for one in keras_compat.whole_batch(rows, rows[:, :1], rows[:, 0])
    ],
    "seeds": len(keras_compat.seed_states(tried)),
}
"""
