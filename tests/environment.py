"""What the processes that tests start have in their environment."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Most tests train one of a few models: without the cache XLA compiles each of them a hundred times,
# which is more than half of the time on JAX.
COMPILED_PROGRAMS = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "jax-cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def keep_compiled_programs():
    """Lets this process, and those that it starts, compile on JAX what none has compiled yet."""
    for name, value in COMPILED_PROGRAMS.items():
        os.environ.setdefault(name, value)
