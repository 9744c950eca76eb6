"""The numbers of workers and devices, and the cases that run on them.

Most cases are those of `tests.conformance`: a group of processes runs each of them together, and
every worker compares what it got with plain Keras. The others stand in the modules ``cases_*`` of
this folder.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.conformance import registry
from tests.environment import everything

# About one process: its strategies, its files, its cost, what it prints. For files and what is
# printed on several workers there are cases of their own.
NOT_HERE = (
    "strategies.",
    "offload.",  # on workers: `cases_offload_workers`
    "sharding.",
    "cost.",
    "saving.",
    "checkpoints.",  # on workers: `cases_worker_checkpoints`
    "bad_input.",
    "models.really_distributed",
    "async_checkpoint.",  # on workers: `cases_worker_callbacks`
    "callbacks.model_checkpoint",
    "restarts.one_device",  # there each worker would train alone, with backups in one folder
    "restarts.pipeline_that_draws",  # on that backend each worker would draw other numbers
    "newer_keras.orbax_checkpoint",  # on workers: `cases_worker_callbacks`
    "training.verbose",
    "executions.central_storage",
    "reading.central_storage",
    "telemetry.",  # on workers: `cases_worker_callbacks`
    "losses.added_losses_read_after_a_step",  # would take a collective a step on PyTorch
    "generated.",  # many cases in one
    "calls.",  # likewise
    "from_outside.fit_alone_in_the_scope",  # each worker would train by itself: `ScopeError`
    "from_outside.new_head_after_the_scope",  # likewise
    "check.",  # on workers the chief warns for all: `cases_worker_checks`
    "python_state.shared_and_found",  # workers share nothing
    "copies.",  # many cases in one
    "overrides.",  # likewise
    *registry.AS_USERS_HAVE_IT,  # about the environment
)

_LIKE_GPUS = "like-gpus"
_WITHIN_HOST = "-within-host"


@dataclass(frozen=True)
class Layout:
    workers: int
    devices: int
    # What is special: that devices behave as accelerators do (`tests.gpu_like.emulation`), or what
    # the workers divide (`kerasdist.Sharding.state`), all of them or those of each of two hosts.
    special: str = ""

    @property
    def replicas(self) -> int:
        return self.workers * self.devices

    @property
    def like_gpus(self) -> bool:
        return self.special == _LIKE_GPUS

    @property
    def sharding(self) -> str | None:
        return None if self.like_gpus else self.special.removesuffix(_WITHIN_HOST) or None

    @property
    def within(self) -> str | None:
        return "host" if self.special.endswith(_WITHIN_HOST) else None

    @property
    def workers_a_host(self) -> int:
        return self.workers // 2 if self.within else self.workers

    @property
    def shards(self) -> int:
        """How many devices divide a variable."""
        return self.workers_a_host * self.devices

    def __str__(self) -> str:
        return "-".join(filter(None, [f"{self.workers}x{self.devices}", self.special]))

    @classmethod
    def of(cls, text: str) -> "Layout":
        counts, _, special = text.partition("-")
        workers, _, devices = counts.partition("x")
        return cls(int(workers), int(devices), special)


PAIR = Layout(2, 1)

# Besides the pair, on which all cases run.
LARGER = {
    "tensorflow": (Layout(2, 2), Layout(3, 1)),
    "jax": (Layout(2, 2), Layout(3, 1)),
    "torch": (Layout(3, 1), Layout(4, 1)),
}

# Of the conformance cases on the pair a run of the tests takes one of so many: XLA compiles each
# case's programs, TensorFlow traces them, torch does neither.
ONE_OF = {"tensorflow": 24, "jax": 24, "torch": 6}

# In every run of the tests: what other cases on workers do not show.
_ALWAYS = (
    "executions.ragged_ends",  # programs of several steps
    "lookups.eagerly",  # tables that are looked up once for a batch of a known size
    "models.sparse_gradients",
    "optimizers.own_apply",  # whose gradients are not those of the backward pass
    "models.sublayer_that_is_never_called",  # Keras's predict calls the model with a global batch
    "passes.found",  # where one worker alone has too little memory
    "own_data.nothing_built_eagerly",  # metrics that are built within a step
    "restarts.averages",  # backups, and callbacks' state
    "restarts.two_calls_of_fit",  # metrics with sums of an earlier call
    "step_logs.renamed_logs_of_keras",  # a step's results of metrics, summed over the workers
)

# What depends on the number of replicas.
_ON_LARGER = (
    "ragged.fewer_examples",
    "ragged.predict_in_order",
    "workers.",
    "worker_checks.found",
    "worker_checks.own_rows",
    "shards.off",
    "shards.arrays_by",
    "shards.data_policy",
    "layout_maps.",
    "jax_workers.",
    "worker_checkpoints.into_others",
)

# Whose replicas divide the state of a model (`sharding=`). The first of each in `make test`, in
# `make test-slow` a few cases of the first one of two hosts. TensorFlow refuses `sharding=`.
SHARDED = {
    "tensorflow": (),
    "jax": (
        Layout(2, 1, "full"),
        Layout(2, 1, "optimizer"),
        Layout(2, 2, "full"),
        Layout(2, 2, f"full{_WITHIN_HOST}"),
    ),
    "torch": (
        Layout(2, 1, "full"),
        Layout(2, 1, "optimizer"),
        Layout(3, 1, "full"),
        Layout(4, 1, f"full{_WITHIN_HOST}"),
        Layout(4, 1, f"optimizer{_WITHIN_HOST}"),
    ),
}
_ON_SHARDED = (
    *("sharded_state.", "sharded_backups.", "sharded_models.", "sharded_layers."),
    "sharded_adapters.",
)
# In a run of the tests: what reads or writes state by itself, and what goes over all weights.
_SELECTED_ON_SHARDED = (
    *_ON_SHARDED,
    "callbacks.callback_reads_and_writes",
    "executions.ragged_ends",
    "losses.regularizers",
    "models.sparse_gradients",
    "normalization.rematerialized",  # whose layers read weights in the backward pass
    "normalization.synchronised",
    "optimizers.accumulation",
    "optimizers.ema_overwrite",
    "optimizers.global_clipnorm_opposing",
    "optimizers.loss_scale_overflow",
    "offload_workers.",
    "optimizers.one_for_some_layers",
    "optimizers.own_apply",
    "ragged.fewer_examples_than_replicas",
    "restarts.averages",
    "steps.gradient_penalty",
    "steps.two_optimizers",
    "training.on_batch_methods",
    "worker_callbacks.checkpoints",
    "worker_callbacks.torn_backups",
    "worker_checkpoints.",
    "worker_checks.error_on_one",
    "worker_checks.found",
    "worker_saves.save_on_all_workers",
    "workers.custom_loop",
    "workers.equal_order",
)
_WITHIN_HOST_ALWAYS = (
    "sharded_state.each_holds_its_part",
    "sharded_state.saved_and_loaded",
    "sharded_models.as_many_collectives_as_fsdp2",
    "sharded_models.gathered_by_groups",
    "sharded_models.shared_and_tied_weights",
)
# There no worker alone reads or changes a variable.
_NOT_ON_SHARDED = (
    "in_scope.",
    "callbacks.backup_and_restore",  # Keras's own, refused
    "disagreements.on_a_weight",  # found as it is assigned
    "jax_workers.",
    "torch_workers.",
    "worker_callbacks.broadcast_of_variables",
    "worker_callbacks.kerass_own_backups",
    "worker_compilation.",  # refused with gathered weights
    "worker_saves.chief_alone_in_the_scope",
    "worker_saves.save_on_some_workers",
)

# What differs where the devices of a worker share no memory.
GPUS = {"tensorflow": (Layout(2, 2, _LIKE_GPUS),), "jax": (), "torch": ()}
_ON_GPUS = (
    "optimizers.global_clipnorm_opposing",
    "training.steps_per_execution_equals_single_steps",
)

OWN = "tests.multiprocess"


def cases() -> dict[str, registry.Case]:
    return {**registry.load(), **registry.load(OWN)}


def limits() -> dict[str, float]:
    return {name: case.seconds for name, case in cases().items()}


def keys(backend: str, layout: Layout) -> Iterator[str]:
    for case in cases().values():
        if backend not in case.backends or case.name.startswith(NOT_HERE):
            continue
        if layout.sharding:
            if not case.name.startswith(_NOT_ON_SHARDED):
                yield case.name
        elif case.name.startswith(_ON_SHARDED):
            continue
        elif layout.like_gpus:
            if whole() or case.name in _ON_GPUS:
                yield case.name
        elif layout == PAIR or case.name.startswith(_ON_LARGER):
            yield case.name


def whole() -> bool:
    """Whether all cases shall run on all layouts: ``KERASDIST_MULTIPROCESS_FULL=1``."""
    return os.environ.get("KERASDIST_MULTIPROCESS_FULL") == "1"


def pairs(backend: str) -> tuple[Layout, ...]:
    return (PAIR, *SHARDED[backend][:1])


def layouts(backend: str) -> tuple[Layout, ...]:
    """The layouts of a run of the tests: pairs and two hosts, in `make test-everything` all."""
    within_host = [one for one in SHARDED[backend] if one.within][:1]
    others = (*LARGER[backend], *GPUS[backend], *SHARDED[backend][1:])
    return (*pairs(backend), *(others if whole() or everything() else within_host))


def selected(backend: str, layout: Layout) -> Iterator[str]:
    """The cases that a run of the tests takes: each backend another part of the common ones."""
    own, everyone = registry.load(OWN), cases()
    for key in keys(backend, layout):
        if layout.sharding and layout.within and not everything():
            chosen = key.startswith(_WITHIN_HOST_ALWAYS)
        elif layout.sharding:
            chosen = key.startswith(_SELECTED_ON_SHARDED)
        else:
            chosen = layout != PAIR or key in own or key.startswith(_ALWAYS) or _drawn(backend, key)
        if layout in pairs(backend):
            case = everyone[key]
            has_its_like = registry.has_its_like(case, backend) if key in own else bool(case.like)
            is_left_out = has_its_like and not key.startswith(_ALWAYS)
            if layout.sharding and backend != registry.CHEAPEST:
                is_left_out |= not key.startswith(_ON_SHARDED)
            chosen = chosen and is_left_out == everything()
        if whole() or chosen:
            yield key


def is_slow(backend: str, layout: Layout, key: str) -> bool:
    return layout not in pairs(backend) or registry.is_slow(cases()[key], backend, OWN)


def _drawn(backend: str, key: str) -> bool:
    """Whether a case is of the part that a backend runs on the pair."""
    turn = registry.BACKENDS.index(backend)
    return zlib.crc32(key.encode()) % ONE_OF[backend] == turn
