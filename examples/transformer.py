"""Train a language model on all devices, in bfloat16, on numbers that follow a rule.

Each token of a sequence is three times the token before it, plus one, modulo the size of the
vocabulary. The default size of the model is meant for GPUs or TPUs. The first command predicts
memory and time on GPUs, the second trains a smaller model:

    kerasdist plan examples/transformer.py --devices 8xh100
    python examples/transformer.py --blocks 2 --width 64     # on a laptop
"""

import argparse

import keras
import numpy as np
from keras import layers

import kerasdist as kd


def sequences(count: int, length: int, vocabulary: int) -> np.ndarray:
    """Return `count` sequences of `length + 1` tokens."""
    tokens = np.empty((count, length + 1), "int32")
    tokens[:, 0] = np.random.default_rng(0).integers(0, vocabulary, count)
    for place in range(length):
        tokens[:, place + 1] = (3 * tokens[:, place] + 1) % vocabulary
    return tokens


def build_model(blocks: int, width: int, length: int, vocabulary: int) -> keras.Model:
    """Return a compiled decoder that predicts each next token."""
    tokens = keras.Input((length,), dtype="int32")
    places = keras.ops.add(keras.ops.zeros_like(tokens), keras.ops.arange(length))
    x = layers.Embedding(vocabulary, width)(tokens) + layers.Embedding(length, width)(places)
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        heads = max(1, width // 64)
        x += layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        x += layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(h))
    logits = layers.Dense(vocabulary, dtype="float32")(layers.LayerNormalization()(x))
    model = keras.Model(tokens, logits)
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def draw(path: str, tokens: np.ndarray, logits: np.ndarray) -> None:
    """Draw how likely each next token is for the model after each of the first 64 tokens."""
    import matplotlib.pyplot as plt

    chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    table = [chances[tokens == one].mean(axis=0) for one in np.unique(tokens)[:64]]
    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.imshow(np.transpose(table), aspect="auto", cmap="Blues", origin="lower")
    plt.colorbar(label="predicted chance")
    plt.xlabel("token x")
    plt.ylabel("next token; the rule is 3 x + 1")
    plt.savefig(path)


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description="Train a language model.")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a device")
    parser.add_argument("--steps", type=int, default=4, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    with strategy.scope():
        model = build_model(options.blocks, options.width, options.length, options.vocabulary)
    global_batch = options.batch * strategy.num_replicas_in_sync
    tokens = sequences(options.steps * global_batch, options.length, options.vocabulary)
    history = model.fit(
        tokens[:, :-1], tokens[:, 1:], batch_size=global_batch, epochs=options.epochs, verbose=2
    )
    if options.figure:
        draw(options.figure, tokens[:64, :-1], model.predict(tokens[:64, :-1], verbose=0))
    loss = history.history["loss"][-1]
    print(
        f"{strategy.num_replicas_in_sync} replicas: loss {loss:.4f}, {model.count_params()} weights"
    )


if __name__ == "__main__":
    main()
