"""Tests that need not pass under a strategy: backend, the beginning of their names, the reason."""

_EACH_STARTS_WITH_IT = {
    "metrics/iou_metrics_test.py::MeanIoUTest::test_big_chunk": (
        "it adds a state variable with a start value of its own; each replica's part starts with "
        "it, and what is read is the sum of the parts, as in `tf.distribute`"
    )
}

_STRATEGY_OF_ITS_OWN = {
    "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_": (
        "it opens the scope of a `tf.distribute.MirroredStrategy`, which TensorFlow refuses inside "
        "of another strategy's"
    )
}

EXCEPTIONS: dict[str, dict[str, str]] = {
    "tensorflow": {**_EACH_STARTS_WITH_IT, **_STRATEGY_OF_ITS_OWN},
    "jax": {**_EACH_STARTS_WITH_IT},
    "torch": {**_EACH_STARTS_WITH_IT},
}


def reason(backend: str, test: str) -> str | None:
    """Returns why a test need not pass, None if it must."""
    reasons = EXCEPTIONS.get(backend, {}).items()
    return next((why for begin, why in reasons if test.startswith(begin)), None)
