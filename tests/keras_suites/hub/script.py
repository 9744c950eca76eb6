"""Trains small models of KerasHub and searches with KerasTuner, once plain and once distributed.

    PYTHONPATH=.:.venv/keras-hub KERAS_BACKEND=jax python -m tests.keras_suites.hub.script

Prints a JSON object: for each case the two results, or the error. Weights are drawn by seed and
vocabularies are made here: nothing is downloaded.
"""

import contextlib
import json
import tempfile
import traceback
from typing import Any

import keras
import keras_hub
import keras_tuner
import numpy as np
from keras_hub.src.models.mixtral import mixtral_decoder
from keras_hub.src.models.qwen3_moe import qwen3_moe_decoder

import kerasdist as kd

REPLICAS = 2
TEXTS = [
    "the quick fox",
    "a lazy dog",
    "the dog runs",
    "quick quick fox runs",
    "lazy",
    "a fox",
    "the lazy fox runs",
]
LABELS = np.array([0, 1, 1, 0, 1, 0, 0])
WORDS = ["the", "a", "quick", "lazy", "fox", "dog", "runs"]


def classifier() -> Any:
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=8,
        dropout=0.0,  # replicas on TensorFlow and PyTorch draw other masks than one device
    )
    model = keras_hub.models.BertTextClassifier(
        backbone=backbone, preprocessor=preprocessor, num_classes=2, dropout=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def scope_of(strategy: kd.Strategy | None) -> Any:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def train_on_texts(model: Any) -> dict[str, Any]:
    history = model.fit(TEXTS, LABELS, batch_size=3, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "evaluate": model.evaluate(TEXTS, LABELS, batch_size=4, verbose=0, return_dict=True),
        "predict": model.predict(TEXTS, batch_size=4, verbose=0),
        "weights": model.get_weights(),
    }


def text_classifier(strategy: kd.Strategy | None) -> dict[str, Any]:
    with scope_of(strategy):
        model = classifier()
    return train_on_texts(model)


def lora(strategy: kd.Strategy | None) -> dict[str, Any]:
    with scope_of(strategy):
        model = classifier()
        model.backbone.enable_lora(2)
        model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
    found = train_on_texts(model)
    trainable = len(model.backbone.trainable_variables)
    return {"trainable": trainable, "history": found["history"], "weights": found["weights"]}


def causal_lm(strategy: kd.Strategy | None) -> dict[str, Any]:
    pieces = sorted({"Ġ", *"".join(WORDS)})
    tokens = ["<|endoftext|>", *pieces, "do"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    with scope_of(strategy):
        tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["d o"])
        model = keras_hub.models.GPT2CausalLM(
            backbone=keras_hub.models.GPT2Backbone(
                vocabulary_size=len(vocabulary),
                num_layers=1,
                num_heads=2,
                hidden_dim=8,
                intermediate_dim=16,
                max_sequence_length=12,
                dropout=0.0,
            ),
            preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12),
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, sampler="greedy")
    history = model.fit(TEXTS, batch_size=3, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "weights": model.get_weights(),
        "generate": model.generate(["the quick", "a"], max_length=10),
    }


def balance_over_the_global_batch(decoder: Any) -> None:
    """What docs/guides/data.md says of models with a router."""
    loss = decoder.compute_load_balancing_loss
    decoder.compute_load_balancing_loss = lambda router_logits, attention_mask, **options: loss(
        kd.global_batch(router_logits),
        attention_mask=None if attention_mask is None else kd.global_batch(attention_mask),
        **options,
    )


def mixture_of_experts(strategy: kd.Strategy | None) -> dict[str, Any]:
    sizes = {"num_layers": 2, "num_query_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    sizes |= {"hidden_dim": 8, "intermediate_dim": 16, "top_k": 2, "vocabulary_size": 20}
    makers = (
        lambda: keras_hub.models.MixtralBackbone(
            **sizes, sliding_window=4, router_aux_loss_coefficient=0.5
        ),
        lambda: keras_hub.models.Qwen3MoeBackbone(
            **sizes, head_dim=4, moe_intermediate_dim=8, router_aux_loss_coefficient=0.5
        ),
    )
    rng = np.random.default_rng(0)
    mask = rng.random((7, 6)) > 0.2
    mask[:, 0] = True
    x = {"token_ids": rng.integers(0, 20, (7, 6)), "padding_mask": mask}
    y = rng.normal(size=(7, 6, 8)).astype("float32")
    histories = []
    for make in makers:
        with scope_of(strategy):
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        fitted = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        histories.append(fitted.history)
    return {"histories": histories}


def random_search(strategy: kd.Strategy | None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def build(hp: Any) -> Any:
        keras.utils.set_random_seed(3)
        units = hp.Int("units", 2, 6, step=2)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
        )
        rate = hp.Choice("rate", [0.01, 0.05])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
        return model

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(
            build,
            objective="val_loss",
            max_trials=2,
            seed=5,
            directory=folder,
            project_name="search",
            distribution_strategy=strategy,
        )
        tuner.search(x, y, batch_size=5, epochs=2, validation_split=0.2, shuffle=False, verbose=0)
        trials = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
        best = tuner.get_best_models(1)[0]
        return {
            "values": [trial.hyperparameters.values for trial in trials],
            "scores": [trial.score for trial in trials],
            "best": tuner.get_best_hyperparameters(1)[0].values,
            "weights": best.get_weights(),
        }


CASES = (text_classifier, lora, causal_lm, mixture_of_experts, random_search)


def main() -> None:
    keras.utils.disable_interactive_logging()
    for decoder in (mixtral_decoder, qwen3_moe_decoder):
        balance_over_the_global_batch(decoder)
    distributed = kd.MirroredStrategy([f"cpu:{index}" for index in range(REPLICAS)])
    results = {}
    for case in CASES:
        found = []
        for strategy in (None, distributed):
            keras.backend.clear_session()
            keras.utils.set_random_seed(1)
            try:
                found.append(case(strategy))
            except Exception:  # noqa: BLE001 (the test shows it)
                found.append({"error": traceback.format_exc()})
        results[case.__name__] = found
    print(json.dumps(results, default=lambda array: array.tolist()))


if __name__ == "__main__":
    main()
