"""Classify passages of text by their topic, with a transformer in mixed precision.

The text comes with Python: it is what `help("...")` prints in an interpreter, from
`pydoc_data.topics`. The eight longest topics are cut into passages; the model reads a passage and
says from which topic it is. Passages differ in length, so a mask hides the padding. The loss does
not count the padding, however it is spread over the devices.

    KERAS_BACKEND=torch python examples/text_transformer.py
"""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers

import kerasdist as kd

TOPICS = sorted(topics, key=lambda name: len(topics[name]))[-8:]
WORDS = 1500  # of the vocabulary; 0 is padding and 1 any other word
LENGTH = 32
BATCH_SIZE = 64


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Return passages of 12 to 32 words, padded with 0, and the number of each one's topic."""
    random = np.random.default_rng(0)
    words = {name: re.findall(r"[a-z_]+|[^\sa-z_]", topics[name].lower()) for name in TOPICS}
    counts = Counter(word for name in TOPICS for word in words[name])
    number = {word: index for index, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}
    passages, labels = [], []
    for label, name in enumerate(TOPICS):
        start = 0
        while start + LENGTH < len(words[name]):
            length = int(random.integers(12, LENGTH + 1))
            passage = [number.get(word, 1) for word in words[name][start : start + length]]
            passages.append(passage + [0] * (LENGTH - length))
            labels.append(label)
            start += length
    order = random.permutation(len(labels))
    return np.array(passages, "int32")[order], np.array(labels, "int32")[order]


def build_model(steps: int, width: int = 48) -> keras.Model:
    """Return a compiled transformer of one block; its learning rate rises, then falls to zero."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    mask = keras.ops.not_equal(tokens, 0)
    places = keras.ops.add(keras.ops.zeros_like(tokens), keras.ops.arange(LENGTH, dtype="int32"))
    x = layers.Embedding(WORDS, width)(tokens) + layers.Embedding(LENGTH, width)(places)
    x = layers.Dropout(0.3)(x)
    attention = layers.MultiHeadAttention(4, width // 4, dropout=0.1)
    seen = keras.ops.expand_dims(mask, 1)  # every word looks at those that are no padding
    x = layers.LayerNormalization()(x + attention(x, x, attention_mask=seen))
    x = layers.LayerNormalization()(x + layers.Dense(width, activation="gelu")(x))
    x = layers.GlobalAveragePooling1D()(x, mask=mask)
    # Logits, and the loss of them, are computed in float32.
    model = keras.Model(tokens, layers.Dense(len(TOPICS), dtype="float32")(x))
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=4e-3, warmup_steps=steps // 10
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def draw(path: str, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Draw how often a passage of each topic was taken for which."""
    import matplotlib.pyplot as plt
    from sklearn.metrics import ConfusionMatrixDisplay

    _, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(
        *(labels, predicted),
        display_labels=TOPICS,
        xticks_rotation=40,
        cmap="Blues",
        ax=axes,
        colorbar=False,
    )
    axes.set_aspect("auto")
    plt.setp(axes.get_xticklabels(), ha="right")
    plt.savefig(path)


def main() -> None:
    """Train, and print the accuracy on passages that the model has not seen."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    epochs = options.epochs

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    x, y = load_data()
    held_out = len(x) // 5
    keras.config.set_dtype_policy("mixed_bfloat16")  # layers compute in bfloat16, weights stay
    with strategy.scope():
        model = build_model(steps=epochs * -(-(len(x) - held_out) // BATCH_SIZE))
    history = model.fit(
        x[held_out:],
        y[held_out:],
        batch_size=BATCH_SIZE,
        epochs=epochs,
        validation_data=(x[:held_out], y[:held_out]),
        verbose=2,
    )
    if options.figure:
        predicted = model.predict(x[:held_out], batch_size=BATCH_SIZE, verbose=0).argmax(axis=1)
        draw(options.figure, y[:held_out], predicted)
    most_frequent = np.max(np.bincount(y[:held_out])) / held_out
    accuracy = history.history["val_accuracy"][-1]
    print(
        f"{strategy.num_replicas_in_sync} replicas: accuracy {accuracy:.4f} on {held_out} unseen "
        f"passages; always the same answer would have {most_frequent:.2f}"
    )


if __name__ == "__main__":
    main()
