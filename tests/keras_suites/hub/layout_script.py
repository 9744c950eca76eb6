"""A worker that trains KerasHub's Gemma by its own map, beside plain Keras; prints differences.

    PYTHONPATH=.:.venv/keras-hub KERAS_BACKEND=torch python -m kerasdist run --workers 4 \
        tests/keras_suites/hub/layout_script.py
"""

import json

import keras
import keras_hub
import numpy as np

import kerasdist as kd

ROWS, WORDS = 9, 5


def build():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=16,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=8,
        intermediate_dim=32,
        head_dim=4,
    )
    model = keras.Model(backbone.input, keras.layers.Dense(4, name="head")(backbone.output))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def trained(model):
    random = np.random.default_rng(0)
    ids = random.integers(0, 16, (ROWS, WORDS)).astype("int32")
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    y = random.normal(size=(ROWS, WORDS, 4)).astype("float32")
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return [history["loss"], model.predict(x, batch_size=4, verbose=0), *model.get_weights()]


def main():
    expected = trained(build())
    resolver = kd.cluster.detect()
    workers = resolver.num_workers
    names = [f"cpu:{number}" for number in range(workers)]
    mesh = keras.distribution.DeviceMesh((workers // 2, 2), ("batch", "model"), names)
    layouts = keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=layouts)
    with strategy.scope():
        model = build()
    actual = trained(model)
    rows = kd.describe_layout(model).rows
    differences = [
        float(np.max(np.abs(np.asarray(one) - np.asarray(other))))
        for one, other in zip(expected, actual, strict=True)
    ]
    if strategy.is_chief:
        divided = sum("model" in layout for _, _, layout, _, _ in rows)
        print(json.dumps({"replicas": strategy.num_replicas_in_sync, "divided": divided}), end=" ")
        print(json.dumps(max(differences)))


if __name__ == "__main__":
    main()
