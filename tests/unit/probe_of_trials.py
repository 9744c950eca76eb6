"""What trials ask of ``keras_compat/models.py``, for fresh processes of `test_keras_compat.py`."""

TRIALS = """
tried = keras.Sequential([
    keras.Input((2,)),
    keras.layers.Dense(1, name="dense", activity_regularizer="l2"),
    keras.layers.Dropout(0.5, seed=1, name="dropout"),
    keras.layers.GaussianNoise(0.5, seed=2, name="noise"),
])
tried.compile("sgd", "mae", metrics=["mae"], weighted_metrics=["mse"])
drawn, ones = [], keras.ops.ones((2, 2))

def noted(original, *args, **kwargs):
    drawn.append(original.__name__)
    return original(*args, **kwargs)

keras_compat.install(draw=noted)
tried(ones, training=True)
keras.layers.RandomFlip(seed=3)(keras.ops.ones((1, 2, 2, 3)), training=True)
by_layers = sorted(set(drawn) & {"dropout", "normal", "uniform"})
public = {}
arguments = {
    "beta": [(2,), 1.0, 1.0], "binomial": [(2,), 3.0, 0.5], "categorical": [ones, 1],
    "gamma": [(2,), 1.0], "normal": [(2,)], "randint": [(2,), 0, 3],
    "truncated_normal": [(2,)], "uniform": [(2,)], "dropout": [ones, 0.5], "shuffle": [ones],
}
for name, given in arguments.items():
    drawn.clear()
    getattr(keras.random, name)(*given, seed=3)
    public[name] = name in drawn
trials = {
    "by layers": by_layers,
    "public": all(public.values()),
    "compiled": [keras_compat.compiled_losses(tried), keras_compat.compiled_metrics(tried)],
    "logs": keras_compat.numbers_of({"loss": keras.ops.ones(())}),
    "batch": [
        None if one is None else list(one.shape)
        for one in keras_compat.whole_batch(rows, rows[:, :1], rows[:, 0])
    ],
    "seeds": len(keras_compat.seed_states(tried)),
}
"""
