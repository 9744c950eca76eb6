"""Checks that a backup belongs to the same call of `fit`: same model, optimizer, losses and data.

If a run continued with another model or other data, its results would be silently wrong. So
everything that Keras knows about the model and the data must be equal in the backup and in the
restarted script. If only the code of the user's own classes differs, for example, there is a
warning and no error, because the user may have repaired the script before the restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kerasdist.agreement import description
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import BackupError
from kerasdist.job.comparison import first_of

# The names of facts about user code and rows of data. If these facts differ between the backup and
# the script, there is only a warning.
_MAY_DIFFER = frozenset({description.KEY, "uses", description.ROWS})

# Arguments of `compile` that change how fast a step is, but not what it computes.
_HOW_IT_RUNS = ("jit_compile", "run_eagerly")

_ARGUMENTS = ("class_weight", "shuffle", "steps_per_epoch")
_DATA = ("x", "y", "sample_weight")

_RATE = "learning_rate"
_NOTHING = "nothing"
_SHOWN = 100


def of_model(model: object) -> dict[str, object]:
    """Describes, as training begins, the model, its optimizer and the arguments of `compile`."""
    facts = description.facts_of(model, anew=True)
    compiled = {name: one for name, one in facts["compile"].items() if name not in _HOW_IT_RUNS}
    return {**facts, "compile": compiled}


def of_data(given: Mapping[str, object]) -> dict[str, object]:
    """Describes the data in the arguments of `fit`."""
    facts = {name: description.described(given.get(name)) for name in _ARGUMENTS}
    used = {name: given[name] for name in _DATA if given.get(name) is not None}
    return facts | {name: description.of_data(one, None) for name, one in used.items()}


def is_same(
    path: Path, there: Mapping[str, object], here: Mapping[str, object], *, takes_weights: bool
) -> bool:
    """Returns whether a backup is of this call of `fit`; warns of differences that may matter.

    With `takes_weights`, a backup of another call only causes a warning, because only the backup's
    weights are used then.

    Raises:
        BackupError: If the backup belongs to another call and `takes_weights` is False.
    """
    apart = list(_differences(there, json.loads(json.dumps(here))))
    refused = [said for kind, said in apart if kind == "refused"]
    if refused and takes_weights:
        warn_user(
            f"Training begins anew with the weights of the backup {path}, which is of another call "
            f"of fit: {first_of(refused)}."
        )
        return False
    if refused:
        raise BackupError(
            f"Expected the backup {path} to be of this call of fit. Received: {first_of(refused)}. "
            "To train from the beginning, delete the backups in this folder, or take another "
            "folder; to continue from the backups, undo the changes of the script; to begin anew "
            'with their weights, use BackupAndRestore(..., resume="weights").'
        )
    rates = [said for kind, said in apart if kind == _RATE]
    if rates:
        warn_user(
            f"Training goes on with the learning rate of the backup {path}, as in plain Keras, not "
            f"with the script's: {first_of(rates)}. To change it, set "
            "model.optimizer.learning_rate in a callback."
        )
    doubted = [said for kind, said in apart if kind == "doubted"]
    if doubted:
        warn_user(
            f"The script has changed since the backup {path} was written: {first_of(doubted)}. "
            "Training goes on from this backup."
        )
    return True


def _differences(
    there: object, here: object, path: str = "", kind: str = "refused"
) -> Iterator[tuple[str, str]]:
    """Yields each difference between facts: its kind (how much it matters), and its description."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            inner = "doubted" if name in _MAY_DIFFER else kind
            pair = there.get(name, _NOTHING), here.get(name, _NOTHING)
            yield from _differences(*pair, f"{path}.{name}" if path else name, inner)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, pair in enumerate(zip(there, here, strict=True)):
            named = {one.get("class") for one in pair if isinstance(one, dict)}
            which = f" ({named.pop()})" if len(named) == 1 and None not in named else ""
            yield from _differences(*pair, f"{path}[{index}]{which}", kind)
    elif there != here:
        are_rates = isinstance(there, int | float) and isinstance(here, int | float)
        if are_rates and path.endswith(f".{_RATE}"):
            kind = _RATE
        yield kind, f"{path} is {_shown(there)} in the backup and {_shown(here)} in this script"


def _shown(value: object) -> str:
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
