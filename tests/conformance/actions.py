"""What a case does with a model, on one device and under the strategy alike."""

from typing import Any

from tests.conformance.lazy import keras


def _fresh(value: Any) -> Any:
    """Sources that are used up by one run are given as functions that make them."""
    return value() if callable(value) and not isinstance(value, type) else value


def fit(x: Any, y: Any = None, *, callbacks: Any = None, **options):
    """``fit`` that returns the history and every batch's logs; ``x`` and options may be functions
    that make the source afresh."""

    def action(model):
        seen: list[dict] = []
        log = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append({"batch": batch, **logs})
        )
        made = {key: _fresh(value) for key, value in options.items()}
        source = _fresh(x)
        if y is not None:
            made["y"] = y
        history = model.fit(
            source, callbacks=[*(callbacks() if callbacks else ()), log], verbose=0, **made
        )
        return {"history": history, "batches": seen}

    return action


def quiet_fit(x: Any, y: Any = None, **options):
    return lambda model: model.fit(
        _fresh(x), y, verbose=0, **{key: _fresh(value) for key, value in options.items()}
    )


def evaluate(x: Any, y: Any = None, **options):
    return lambda model: model.evaluate(
        _fresh(x), y, verbose=0, return_dict=True, **{k: _fresh(v) for k, v in options.items()}
    )


def predict(x: Any, **options):
    return lambda model: model.predict(_fresh(x), verbose=0, **options)


def used(x: Any, y: Any, batch_size: int, *, epochs: int = 1, **options):
    options["batch_size"] = batch_size
    train = fit(x, y, epochs=epochs, **options)
    return train, evaluate(x, y, **options), predict(x, batch_size=batch_size)
