"""Tests that need not pass under a strategy: backend, the beginning of their names, the reason."""

_ANYWHERE = {
    "metrics/iou_metrics_test.py::MeanIoUTest::test_big_chunk": (
        "it adds a state variable that does not start at zero; each replica's value starts there, "
        "and a read returns the sum of these values, as in `tf.distribute`"
    ),
    "saving/saving_lib_test.py::SavingTest::test_save_model_exception_raised_": (
        "it expects a file without weights where saving has failed; a model of a strategy leaves "
        "what was there"
    ),
}

_WARNED_OF = {
    "models/functional_test.py::FunctionalTest::test_warning_for_mismatched_inputs_structure": (
        "it counts a warning, which comes from the code of each replica; Python shows it once"
    )
}

_STRATEGY_OF_ITS_OWN = dict.fromkeys(
    (
        "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::"
        "test_swap_ema_weights_with_tf_distribute",
        "trainers/data_adapters/tf_dataset_adapter_test.py::TestTFDatasetAdapter::"
        "test_distributed_datasets_from_function_",
    ),
    "it uses a `tf.distribute.MirroredStrategy` of its own, which TensorFlow refuses in the scope "
    "of another strategy",
)
_COPY_BY_COPY = {
    f"optimizers/optimizer_sparse_test.py::OptimizerSparseTest::test_sparse_gradients_{name}": (
        "it expects the optimizer to assign to the mirrored variable; for sparse values the "
        "optimizer updates each device's copy, as in `tf.distribute`"
    )
    for name in (
        "adadelta",
        "adafactor",
        "adagrad",
        "loss_scale_optimizer_sgd",
        "rmsprop",
        "scatter_update",
        "sgd",
    )
}

EXCEPTIONS: dict[str, dict[str, str]] = {
    "tensorflow": {**_ANYWHERE, **_WARNED_OF, **_STRATEGY_OF_ITS_OWN, **_COPY_BY_COPY},
    "jax": _ANYWHERE,
    "torch": {**_ANYWHERE, **_WARNED_OF},
}


def reason(backend: str, test: str) -> str | None:
    reasons = EXCEPTIONS.get(backend, {}).items()
    return next((why for begin, why in reasons if test.startswith(begin)), None)
