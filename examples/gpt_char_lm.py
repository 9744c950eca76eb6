"""Train a small GPT that writes like Python's documentation, letter by letter.

The text comes with Python: it is what `help("...")` prints in an interpreter, from
`pydoc_data.topics`. The optimizer updates the weights after every second batch. It averages the
gradients of the two batches over all devices, and clips the average to a norm of 1. After every
other epoch a callback lets the model continue a sentence.

    KERAS_BACKEND=jax python examples/gpt_char_lm.py
"""

import argparse
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers

import kerasdist as kd

LENGTH = 48  # characters that the model sees
BATCH_SIZE = 64
TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
CHARACTERS = np.unique(np.frombuffer(TEXT, "uint8"))


def load_data(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` pieces of the text as numbers of characters, and each one's successors."""
    numbers = np.searchsorted(CHARACTERS, np.frombuffer(TEXT, "uint8")).astype("int32")
    starts = np.random.default_rng(0).integers(0, len(numbers) - LENGTH - 1, count)
    pieces = numbers[starts[:, np.newaxis] + np.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def build_model(blocks: int = 2, width: int = 64) -> keras.Model:
    """Return a compiled decoder that predicts each next character."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.add(keras.ops.zeros_like(tokens), keras.ops.arange(LENGTH, dtype="int32"))
    x = layers.Embedding(len(CHARACTERS), width)(tokens) + layers.Embedding(LENGTH, width)(places)
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, width // 4)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        x += layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(h))
    model = keras.Model(tokens, layers.Dense(len(CHARACTERS))(layers.LayerNormalization()(x)))
    model.compile(
        optimizer=keras.optimizers.AdamW(
            4e-3, global_clipnorm=1.0, gradient_accumulation_steps=2, weight_decay=0.01
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


class Writer(keras.callbacks.Callback):
    """Continues a sentence. In a job all workers predict together; one of them prints."""

    def __init__(self, beginning: str, length: int, prints: bool) -> None:
        super().__init__()
        self.beginning, self.length, self.prints = beginning, length, prints
        self.text = ""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        del logs
        if epoch % 2 == 0:
            return
        random = np.random.default_rng(epoch)  # all workers draw the same characters
        text = list(np.searchsorted(CHARACTERS, np.frombuffer(self.beginning.encode(), "uint8")))
        for _ in range(self.length):
            seen = text[-LENGTH:]
            padded = np.array([seen + [0] * (LENGTH - len(seen))], "int32")
            logits = self.model.predict_on_batch(padded)[0, len(seen) - 1] / 0.6
            likely = np.exp(logits - logits.max())
            text.append(int(random.choice(len(CHARACTERS), p=likely / likely.sum())))
        self.text = "".join(chr(CHARACTERS[number]) for number in text).replace("\n", " ")
        if self.prints:
            print(self.text)


def draw(path: str, losses: list[float], text: str) -> None:
    """Draw the perplexity of each epoch, and what the model has written at the end."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.plot(range(1, len(losses) + 1), np.exp(losses), marker="o")
    plt.xlabel("epoch")
    plt.ylabel("perplexity in training")
    plt.title(text, fontsize=10, fontfamily="monospace", wrap=True)
    plt.savefig(path)


def main() -> None:
    """Train, and print the perplexity on pieces of the text drawn anew."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pieces", type=int, default=5120, help="of text, in an epoch")
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
    x, y = load_data(options.pieces + 512)
    writer = Writer("The with statement is ", 60, prints=strategy.extended.should_checkpoint)
    history = model.fit(
        *(x[512:], y[512:]),
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        callbacks=[writer],
        verbose=2,
    )
    if options.figure:
        draw(options.figure, history.history["loss"], writer.text)
    loss = model.evaluate(x[:512], y[:512], batch_size=BATCH_SIZE, verbose=0)
    print(
        f"{strategy.num_replicas_in_sync} replicas: perplexity {np.exp(loss):.2f} "
        f"of {len(CHARACTERS)} characters"
    )


if __name__ == "__main__":
    main()
