"""Tune a preset of KerasHub by LoRA, on devices that divide it, and write it for transformers.

Under `sharding="auto"` the large weights of the model are sharded over the devices, so that no
device must hold the whole model. LoRA freezes these weights and trains small matrices beside those
of the attention. `export_to_transformers` merges both and writes files that Hugging Face's
`transformers` can read. The script makes its own preset: a small Gemma that is trained on some of
Python's documentation, and then tuned on Python code. `--preset` names another preset.

    KERAS_BACKEND=jax python examples/tune_a_preset.py
    kerasdist run --workers 2 examples/tune_a_preset.py

It needs JAX or PyTorch, and `pip install keras-hub safetensors`. On PyTorch it starts
a process for each device.
"""

import argparse
import inspect
import io
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import keras
import keras_hub
import numpy as np
import sentencepiece

import kerasdist as kd

LENGTH = 64  # tokens that the model sees


def make_strategy() -> kd.Strategy:
    """Return a strategy over all devices, which divide the model."""
    if kd.cluster.detect() is not None:  # a worker of a job
        return kd.MultiWorkerMirroredStrategy(sharding="auto")
    kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    launcher = "processes" if keras.backend.backend() == "torch" else None
    return kd.MirroredStrategy(sharding="auto", launcher=launcher)


def pieces(text: str, count: int) -> list[str]:
    """Return some pieces of a text, of three lines each."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    starts = np.random.default_rng(0).permutation(len(lines) - 3)[:count]
    return ["\n".join(lines[start : start + 3]) for start in starts]


def make_preset(folder: str, strategy: kd.Strategy, epochs: int) -> None:
    """Train a small Gemma with a tokenizer of its own, and save it as a preset."""
    texts, proto = pieces("\n".join(topics.values()), 256), io.BytesIO()
    names = ("pad", "eos", "bos", "unk")  # in Gemma's order
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=proto,
        vocab_size=512,
        **{f"{name}_id": number for number, name in enumerate(names)},
        **{f"{name}_piece": f"<{name}>" for name in names},
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
    )
    with strategy.scope():
        tokenizer = keras_hub.models.GemmaTokenizer(proto=proto.getvalue())
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=512,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=1,
            hidden_dim=128,
            intermediate_dim=1024,
            head_dim=32,
        )
        preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer)
        model = keras_hub.models.GemmaCausalLM(backbone, preprocessor)
    fit(model, texts, 3e-3, epochs)
    model.save_to_preset(folder)


def fit(model: keras.Model, texts: list[str], rate: float, epochs: int) -> list[float]:
    """Train the model on texts; return the loss of each epoch."""
    model.preprocessor.sequence_length = LENGTH
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model.fit(texts, batch_size=32, epochs=epochs, shuffle=False, verbose=2).history["loss"]


def draw(path: str, losses: list[float]) -> None:
    """Draw the loss of each epoch."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.plot(range(1, len(losses) + 1), losses, marker="o")
    plt.xlabel("epoch of LoRA")
    plt.ylabel("loss on Python code")
    plt.savefig(path)


def main() -> None:
    """Make a preset or take one, tune it, export it; print the losses and the folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--preset", help="its name or folder; else one is made")
    parser.add_argument("--epochs", type=int, default=5)
    default = Path(tempfile.gettempdir()) / "kerasdist_tuned"
    parser.add_argument("--export-to", type=Path, default=default)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    strategy = make_strategy()
    keras.utils.set_random_seed(0)
    preset = options.preset or f"{options.export_to}_preset"
    if options.preset is None:
        make_preset(preset, strategy, options.epochs)

    with strategy.scope():  # each device keeps its part of what is loaded
        model = keras_hub.models.CausalLM.from_preset(preset)
        model.backbone.enable_lora(rank=4)
    layout = kd.describe_layout(model)
    print(f"a device holds {layout.bytes_a_device} of {layout.total_bytes} bytes of the model")
    losses = fit(model, pieces(inspect.getsource(argparse), 256), 1e-2, options.epochs)
    model.export_to_transformers(options.export_to)  # all workers call it; the chief writes
    if options.figure:
        draw(options.figure, losses)
    if strategy.extended.should_checkpoint:  # the chief
        files = sorted(one.name for one in options.export_to.iterdir())
        print(f"written to {options.export_to}: {', '.join(files)}")
    print(
        f"{strategy.num_replicas_in_sync} replicas: loss {losses[0]:.4f} in the first epoch, "
        f"in the last one a loss of {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
