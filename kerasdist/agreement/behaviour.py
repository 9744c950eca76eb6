"""Whether workers compute the same from the same rows.

Code may depend on anything: globals, files, the environment. So workers compare what a step
computes, not what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kerasdist.agreement.measures import difference, measures_of, rounding_of
from kerasdist.backends.base.checks import checksum_of
from kerasdist.errors import DisagreementError
from kerasdist.job import comparison
from kerasdist.job.job import Job

# Workers may have other devices, whose products are exact to three digits only. CPUs round as their
# type does; the loss, a mean over the batch, shows it. Gradients that cancel round more, and a
# metric jumps where an example changes its class.
_DEVICES = 0.01

# Gradients smaller than this part of the largest one may be rounding alone.
_LEAST_PART = 1e-3


def require_equal(
    job: Job,
    logs: Mapping[str, float],
    gradients: Mapping[str, Any],
    dtypes: Iterable[str] | None = None,
) -> None:
    """Raises DisagreementError if a step on the same rows gives workers other results.

    All workers must call it. They send digests, and the chief its results if these differ.

    Args:
        job: The job.
        logs: The losses and metrics.
        gradients: The gradients, by the paths of their variables.
        dtypes: The types in which CPUs have computed; None: other devices have.
    """
    exact = {
        **{name: repr(float(value)) for name, value in logs.items()},
        **{f"gradient of {path}": checksum_of(one) for path, one in gradients.items()},
    }
    if job.all_have_one("results of the first step", comparison.digest(exact)):
        return
    own: dict[str, Any] = {name: float(value) for name, value in logs.items()}
    own.update({f"gradient of {path}": measures_of(one) for path, one in gradients.items()})
    chiefs = job.broadcast_object("results of the first step on the chief", own)
    rounding = _DEVICES if dtypes is None else max(map(rounding_of, dtypes), default=_DEVICES)
    apart = [name for name in {**chiefs, **own} if _is_apart(name, own, chiefs, rounding)]
    shown = {name: _shown(own.get(name)) for name in apart}
    everyone = job.all_gather_object("results of the first step that differ", shown)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    if not names:
        return
    said = comparison.described_difference(
        [
            {name: theirs.get(name, _shown(chiefs.get(name))) for name in names}
            for theirs in everyone
        ]
    )
    raise DisagreementError(
        f"[worker {job.rank}/{job.num_workers}] Expected all workers to compute the same in the "
        f"first step, here from the same rows. Received: {said}. The code of the model, its loss "
        "and metrics, or something that it uses (a global, an attribute of a layer, a file, a "
        "variable of the environment), is not the same on all of them."
    )


def _is_apart(
    name: str, own: Mapping[str, Any], chiefs: Mapping[str, Any], rounding: float
) -> bool:
    one, other = own.get(name), chiefs.get(name)
    if one is None or other is None:
        return True
    if isinstance(one, float):
        both_strange = not math.isfinite(one) and not math.isfinite(other)
        allowed = min(rounding, _DEVICES) if name.endswith("loss") else _DEVICES
        return not both_strange and not math.isclose(one, other, rel_tol=allowed, abs_tol=1e-6)
    largest = max(theirs[0] for theirs in chiefs.values() if isinstance(theirs, list))
    if max(one[0], other[0]) < _LEAST_PART * largest:
        return False
    return difference(one, other) > _DEVICES


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value:.7g}" if isinstance(value, float) else f"norm {value[0]:.7g}"
