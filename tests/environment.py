"""What the processes of the tests have in their environment that users' processes have not.

All of it is here, with its reason: nothing else in tests/ or the Makefile sets a variable that
changes how a framework computes. Cases of `registry.AS_USERS_HAVE_IT` run with none of it
(`of_users`). Not here is what a test is about (``KERASDIST_*``, ``KERAS_BACKEND``, a launcher's
variables), and ``PYTHONDONTWRITEBYTECODE``, which the Makefile takes away so that the tests' some
hundred processes need not compile all modules again.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Setting:
    """A variable that a test's process gets, unless it is set already."""

    name: str
    value: str
    reason: str


# Of all processes.
QUIET = (
    Setting(
        "TF_CPP_MIN_LOG_LEVEL",
        "3",
        "TensorFlow's lines about the processor and CUDA hide what a failed test says",
    ),
)
_KEPT = "most tests train one of a few models: XLA would compile each of them a hundred times"
FULL_FLOAT32 = (
    Setting(
        "NVIDIA_TF32_OVERRIDE",
        "0",
        "TF32, which cuBLAS and cuDNN use on GPUs, rounds to 1e-3: no comparison with plain Keras "
        "holds",
    ),
)
COMPILED_PROGRAMS = (
    Setting("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "jax-cache"), _KEPT),
    Setting("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0", _KEPT),
    Setting("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1", _KEPT),
)

# Before all packages on the path: Keras imports scikit-learn and Matplotlib wherever they are
# installed, which is half of what `import keras` takes on JAX and a quarter on PyTorch, in some
# hundred processes. They run without, as those of users who have neither; kerasdist needs none of
# the two. The examples, Keras's own tests and the processes of `of_users` find both.
ABSENT = str(ROOT / "tests" / "absent")

# Of the suites that ask for CPU devices by number.
_CPU = (
    "the suites have 4 CPU devices on every machine; an accelerator would take what has no device"
)
CPU_DEVICES = (Setting("CUDA_VISIBLE_DEVICES", "-1", _CPU), Setting("JAX_PLATFORMS", "cpu", _CPU))

# Of workers that no launcher starts.
WORKERS = (
    Setting(
        "OMP_NUM_THREADS",
        "1",
        "`kerasdist run` gives each worker its part of the machine's cores; so do the tests that "
        "start workers by themselves",
    ),
)


def _emitters() -> str:
    """A flag that XLA had before JAX 0.11; it ends a process over a flag that it does not know."""
    try:
        major, minor = metadata.version("jaxlib").split(".")[:2]
    except metadata.PackageNotFoundError:
        return ""
    return "--xla_cpu_use_fusion_emitters=false " if (int(major), int(minor)) < (0, 11) else ""


# Of the exactness suites, of custom loops, and of KerasHub's models on JAX. With
# `KERASDIST_TEST_EVERYTHING=1` XLA optimizes, and so it does in every process that is not given
# `suite_settings`: the examples, Keras's own tests, the other unit tests.
SLOWER_KERNELS = Setting(
    "XLA_FLAGS",
    f"{_emitters()}--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
    "three quarters of what XLA takes to compile a small program on a CPU goes into kernels that "
    "are faster, not other ones",
)

# Of the exactness suites on JAX, where they run on an accelerator (`make gpu`).
FULL_PRODUCTS = Setting(
    "JAX_DEFAULT_MATMUL_PRECISION",
    "highest",
    "XLA's own kernels round products to TF32 on GPUs, and to bfloat16 on TPUs",
)

# Of the one script that trains with Keras's own DataParallel on JAX, to be compared with.
PLAIN_DATA_PARALLEL = (
    Setting(
        "NPROC",
        "8",
        "XLA's pool of threads has one a core: on two, a program of plain Keras on two CPU devices "
        "can wait for itself for good, and XLA aborts after 40 seconds (backends/jax/"
        "mesh/placement.py says why; kerasdist's own programs do not need this)",
    ),
)

ALL = (
    *(*QUIET, *FULL_FLOAT32, *COMPILED_PROGRAMS, *CPU_DEVICES, *WORKERS),
    *(SLOWER_KERNELS, *PLAIN_DATA_PARALLEL, FULL_PRODUCTS),
)


def everything() -> bool:
    """Whether this is the part of `make test-everything` that neither other run has."""
    return os.environ.get("KERASDIST_TEST_EVERYTHING") == "1"


def put(settings: Iterable[Setting]):
    """Gives settings to this process, and to those that it starts."""
    for setting in settings:
        os.environ.setdefault(setting.name, setting.value)


def values(settings: Iterable[Setting]) -> dict[str, str]:
    """Settings for a process that is to be started, as far as they are not set already."""
    return {one.name: os.environ.get(one.name, one.value) for one in settings}


def of_all():
    """Gives this process, and those that it starts, what all processes of the tests have."""
    put((*QUIET, *FULL_FLOAT32, *COMPILED_PROGRAMS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ABSENT, path_of_users()]))


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets variables of this process; at the end those that were changed are as they were before.

    The others are left alone, which `mock.patch.dict` sets again: threads of `tf.data` read the
    environment at any time, and the process may crash where one reads while a variable is set.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def find_orbax():
    """Lets this process import Orbax, which is installed beside the locked packages."""
    folder = str(Path(sys.prefix, "orbax"))
    if folder not in sys.path:
        sys.path.append(folder)


def path_of_users() -> str:
    """``PYTHONPATH`` as users have it, with which all installed packages are found."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != ABSENT)


def suite_settings(backend: str) -> tuple[Setting, ...]:
    """What a process of the exactness suites has more than every process of the tests."""
    if os.environ.get("KERASDIST_SUITES_ON", "cpu").startswith("gpu"):
        return (FULL_PRODUCTS,) if backend == "jax" else ()
    optimized = backend != "jax" or everything()
    return CPU_DEVICES if optimized else (*CPU_DEVICES, SLOWER_KERNELS)


def of_suite(backend: str):
    """Gives this process what those of the exactness suites have; before the backend starts."""
    of_all()
    put(suite_settings(backend))


def fail_on_deprecations():
    """What a package announces in kerasdist's own lines is an error, before the release comes."""
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=kind, module=r"kerasdist(\.|$)")


def of_users() -> dict[str, str]:
    ours = {setting.name for setting in ALL}
    theirs = {name: value for name, value in os.environ.items() if name not in ours}
    return theirs | {"PYTHONPATH": path_of_users()}
