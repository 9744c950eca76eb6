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

# Three quarters of what XLA takes to compile a small program on a CPU goes into kernels that are
# faster, not other ones. `KERASDIST_CONFORMANCE_FULL=1` has them, as users do, and so has every
# process that does not call `compile_quickly`: the examples, Keras's own tests, the unit tests.
SLOWER_KERNELS = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def keep_compiled_programs():
    """Lets this process, and those that it starts, compile on JAX what none has compiled yet."""
    for name, value in COMPILED_PROGRAMS.items():
        os.environ.setdefault(name, value)


def compile_quickly():
    """Lets XLA compile for JAX without optimizing, in this process and those that it starts."""
    if os.environ.get("KERASDIST_CONFORMANCE_FULL") != "1":
        os.environ.setdefault("XLA_FLAGS", " ".join(SLOWER_KERNELS))
