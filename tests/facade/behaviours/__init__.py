"""What users of `tf.distribute` rely on, as its public tests and those of Keras 2 show it.

A behaviour is a sentence and a small check. All of a module run one after another, as one case of
this suite, on one strategy of two replicas. Where a backend cannot have it, `differs` says so on
docs/tf-distribute-behaviours.md, and the check holds what it does instead.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.conformance.registry import BACKENDS

# The modules: the theme, and the public tests whose behaviours they have.
MODULES = {
    "contexts": ("Contexts and strategies", "distribute_lib_test, mirrored_strategy_test, "
                 "one_device_strategy_test, central_storage_strategy_test"),
    "reductions": ("Reductions and gathers", "strategy_common_test, strategy_gather_test"),
    "variables": ("Variables", "values_test, vars_test, mirrored_variable_test"),
    "loops": ("Custom loops", "custom_training_loop_*_test, ctl_correctness_test, "
              "minimize_loss_test, keras_optimizer_v2_test"),
    "inputs": ("Input", "input_lib_test, input_lib_type_spec_test, "
               "custom_training_loop_input_test"),
    "names": ("Names of earlier years", "what TensorFlow 1 and MirroredStrategy of 2018 had"),
    "models": ("Models, random numbers and files", "distribute_strategy_test, "
               "keras_correctness_test_base, keras_utils_test, keras_metrics_test, "
               "keras_save_load_test, random_generator_test, checkpointing_test"),
}  # fmt: skip


@dataclass(frozen=True)
class Behaviour:
    says: str
    check: Callable[[Any, Any], None]
    backends: tuple[str, ...]
    # By backend: what is other there.
    differs: Mapping[str, str]


# By module, in its order.
BEHAVIOURS: dict[str, list[Behaviour]] = {}


def behaviour(says: str, *, backends: tuple[str, ...] = BACKENDS, **differs: str) -> Any:
    """Registers a check, which is given the lab and a strategy of two replicas."""

    def register(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        module = check.__module__.rpartition(".")[2]
        listed = BEHAVIOURS.setdefault(module, [])
        if any(one.says == says for one in listed):
            raise ValueError(f"Two behaviours have one sentence. Received: {says!r}. Reword one.")
        listed.append(Behaviour(says, check, backends, differs))
        return check

    return register


def load() -> dict[str, list[Behaviour]]:
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return BEHAVIOURS


def check_all(module: str, lab: Any) -> None:
    """Checks a module's behaviours; tells of all that fail."""
    strategy, failed = lab.strategy(), []
    for one in load()[module]:
        if lab.backend not in one.backends:
            continue
        try:
            one.check(lab, strategy)
        except Exception as error:  # noqa: BLE001 - all are told together
            failed.append(f"{one.says}: {type(error).__name__}: {error}")
    lab.still_usable(strategy)
    lab.check(not failed, "\n".join(failed))
