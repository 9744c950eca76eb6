"""Cases of this suite and of the exactness suite, with all of them inside of the scope.

With ``KERASDIST_MULTIPROCESS_FULL=1`` all that can be, else a selection.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.conformance import registry
from tests.multiprocess import (  # noqa: F401 (their cases are registered)
    cases_chief,
    cases_worker_callbacks,
    cases_worker_saves,
    cases_workers,
)
from tests.multiprocess.layouts import NOT_HERE, OWN, whole

_OWN_THEMES = ("chief.", "worker_callbacks.", "worker_saves.", "workers.")

# Of each kind of thing that a program does, one or two; the second part on torch alone, which
# neither traces nor compiles.
_SELECTED = ("callbacks.callback_reads_and_writes", "own_data.nothing_built_eagerly")
_ON_TORCH = (
    "callbacks.early_stopping",
    "data.py_dataset_uneven",
    "optimizers.ema_overwrite",
    "ragged.fewer_examples_than_replicas",
    "restarts.tf_data_repeated",
    "restarts.two_calls_of_fit",
    "steps.two_optimizers",
    "training.recompile",
    "worker_callbacks.checkpoints",
    "worker_saves.save_on_all_workers",
    "workers.custom_loop",
)
# They are about another strategy, or a model outside of the scope; or compare with a plain model
# that the case makes by itself.
_NOT_IN_SCOPE = (
    "worker_saves.chief_alone_in_the_scope",  # it is there anyway
    "worker_saves.save_on_some_workers",
    "workers.equal_results",
    "workers.model_made_outside_of_the_scope",
    "workers.strategy_of_one_process_beside_the_jobs",
)


def _in_scope(function: Callable[[Any], None], *, is_own: bool) -> Callable[[Any], None]:
    """Cases of the exactness suite enter the scope in `Lab.run`: their plain twins stay outside."""

    def run(lab: Any) -> None:
        lab.acts_in_scope = True
        with lab.strategy().scope() if is_own else contextlib.nullcontext():
            function(lab)

    return run


def _register() -> None:
    own = {
        name: case
        for (suite, name), case in registry.CASES.items()
        if suite == OWN and name.startswith(_OWN_THEMES)
    }
    known = {**registry.load(), **own}
    for name, case in known.items():
        if name.startswith((*NOT_HERE, *_NOT_IN_SCOPE)):
            continue
        if whole() or name in (*_SELECTED, *_ON_TORCH):
            only_torch = name in _ON_TORCH and not whole()
            registry.CASES[OWN, f"in_scope.{name}"] = replace(
                case,
                name=f"in_scope.{name}",
                function=_in_scope(case.function, is_own=name in own),
                backends=("torch",) if only_torch else case.backends,
            )
    if missing := {*_SELECTED, *_ON_TORCH} - set(known):
        raise ValueError(f"Expected names of cases. Received: {sorted(missing)}. Rename them here.")


_register()
