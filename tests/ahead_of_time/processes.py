"""Starts processes that have XLA's compilers for accelerators on their path."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fresh import ROOT, run_python

WHEELS = Path(sys.prefix) / "ahead-of-time"


def run_with_compilers(*arguments: str | Path, seconds: int = 250, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), str(WHEELS)])
    own = {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return run_python(*arguments, seconds=seconds, **own, **variables)


def compiled(target: str, names: Sequence[str], seconds: int) -> dict[str, dict[str, Any]]:
    """What has become of the programs that `programs.py` names, for one target."""
    output = run_with_compilers(
        *("-m", "tests.ahead_of_time.programs", target, *names),
        seconds=seconds,
        KERAS_BACKEND="jax",
        JAX_PLATFORMS="cpu",  # what computes; compiled is for what is described
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # another test may compile at the same time
        XLA_FLAGS="--xla_gpu_autotune_level=0",
    )
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in found}
