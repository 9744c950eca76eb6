"""What `test_keras_compat.py` looks at of ``keras_compat/trials.py``, in its fresh processes."""

TRIALS = """
from kerasdist.keras_compat import patches as seam

tried = keras.Sequential([
    keras.Input((2,)),
    keras.layers.Dense(1, name="dense", activity_regularizer="l2"),
    keras.layers.Dropout(0.5, seed=1, name="dropout"),
    keras.layers.GaussianNoise(0.5, seed=2, name="noise"),
])
tried.compile("sgd", "mae", metrics=["mae"], weighted_metrics=["mse"])
drawn, module = [], keras.src.backend.random
ones = keras.ops.ones((2, 2))
arguments = {
    "beta": [(2,), 1.0, 1.0], "binomial": [(2,), 3.0, 0.5], "categorical": [ones, 1],
    "gamma": [(2,), 1.0], "normal": [(2,)], "randint": [(2,), 0, 3],
    "truncated_normal": [(2,)], "uniform": [(2,)], "dropout": [ones, 0.5], "shuffle": [ones],
}
originals = {name: getattr(module, name) for name in arguments}
try:
    for name, original in originals.items():
        def noted(*args, name=name, original=original, **kwargs):
            drawn.append(name)
            return original(*args, **kwargs)
        setattr(module, name, noted)
    tried(ones, training=True)
    by_layers = sorted(drawn)
    public = {}
    for name, given in arguments.items():
        before = len(drawn)
        getattr(keras.random, name)(*given, seed=3)
        public[name] = name in drawn[before:]
finally:
    for name, original in originals.items():
        setattr(module, name, original)
trials = {
    "by layers": by_layers,
    "public": sorted(public) == sorted([*seam.DRAWING, *seam.RESHUFFLING])
        and all(public.values()),
    "compiled": [keras_compat.compiled_losses(tried), keras_compat.compiled_metrics(tried)],
    "logs": keras_compat.numbers_of({"loss": keras.ops.ones(())}),
    "batch": [
        None if one is None else list(one.shape)
        for one in keras_compat.whole_batch(rows, rows[:, :1], rows[:, 0])
    ],
    "seeds": len(keras_compat.seed_states(tried)),
}
"""
