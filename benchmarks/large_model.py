"""A KerasHub model of 109 million weights, fine-tuned with sharded weights, beside one device.

    KERAS_BACKEND=torch python benchmarks/large_model.py [--workers 2 4] [--layers 12]

BERT's backbone with random weights and a classifier on it, trained whole and with LoRA, three steps
of Adam each, by `fit` with `sharding="full"`. Prints the bytes that the chief holds of weights and
optimizer, and how much losses and weights differ from those of one device. Exits with 1 if they
differ by more than rounding. KerasHub is in ``.venv/keras-hub`` (`make venv`).
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

ROOT = Path(__file__).parents[1]
LENGTH, BATCH, STEPS, WORDS, CLASSES = 16, 4, 3, 30522, 2
RATE = 1e-5
# Adam divides by the root of squared gradients, so that the rounding of a small gradient may turn
# its step around: in so many steps a weight may differ by twice the rate in each.
MOST = 2 * RATE * STEPS
ROW = "{:>10} {:>8} {:>12} {:>12} {:>12} {:>10} {:>12}"


def trained(workers, layers, with_lora):
    """What the chief holds, the losses, and the weights that were trained."""
    sys.path.append(str(ROOT / ".venv" / "keras-hub"))
    import keras
    import keras_hub
    import numpy as np

    import kerasdist as kd

    keras.utils.set_random_seed(7)
    if workers == 1:
        strategy = kd.OneDeviceStrategy("cpu:0")
    else:
        strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding="full")
    with strategy.scope():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=WORDS,
            num_layers=layers,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=3072,
            dropout=0.0,
            max_sequence_length=LENGTH,
        )
        if with_lora:
            backbone.enable_lora(rank=4)
        outputs = keras.layers.Dense(CLASSES)(backbone(backbone.input)["pooled_output"])
        model = keras.Model(backbone.input, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(RATE), loss)
    drawn = np.random.default_rng(0)
    rows = BATCH * STEPS
    x = {
        "token_ids": drawn.integers(0, WORDS, (rows, LENGTH)),
        "segment_ids": np.zeros((rows, LENGTH), "int32"),
        "padding_mask": np.ones((rows, LENGTH), "int32"),
    }
    y = drawn.integers(0, CLASSES, rows)
    losses = []
    read = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[read])
    held = [sum(map(bytes_of, kind)) for kind in (model.weights, model.optimizer.variables)]
    weights = [keras.ops.convert_to_numpy(one) for one in model.trainable_variables]
    return model.count_params(), held, losses, weights


def bytes_of(variable):
    """The bytes of a variable that this worker holds."""
    stored = variable._value
    parts = getattr(stored, "addressable_shards", None)
    return stored.nbytes if parts is None else sum(part.data.nbytes for part in parts)


def main():
    import numpy as np

    import kerasdist as kd

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    head = ("trained", "workers", "weights", "bytes", "optimizer", "losses", "weights")
    print(f"on {os.environ['KERAS_BACKEND']}\n{ROW.format(*head)}")
    worst = 0.0
    for with_lora in (False, True):
        expected = None
        for workers in (1, *arguments.workers):
            given = (workers, arguments.layers, with_lora)
            elements, held, losses, weights = kd.launch(trained, given, workers=workers)
            if expected is None:
                expected = losses, weights
            pairs = zip(expected[1], weights, strict=True)
            apart = max(float(np.max(np.abs(one - other))) for one, other in pairs)
            of_losses = float(np.max(np.abs(np.array(losses) - np.array(expected[0]))))
            worst = max(worst, apart)
            kind = "LoRA" if with_lora else "whole"
            shown = (kind, workers, elements, *held, f"{of_losses:.1e}", f"{apart:.1e}")
            print(ROW.format(*shown), flush=True)
    sys.exit(0 if worst <= MOST else f"weights differ by {worst}, more than {MOST}")


if __name__ == "__main__":
    main()
