"""The replicas of a strategy on PyTorch, and how they run a step together."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_of
from kerasdist.api.options import ReduceOp
from kerasdist.api.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    per_replica,
    require_one_each,
)
from kerasdist.backends.base.checks import check_shapes, checked_axes, checked_axis
from kerasdist.backends.base.interface import ReplicaOptions, ReplicaSet
from kerasdist.backends.base.runner import Runner, SoleRunner
from kerasdist.backends.base.variable_rules import require_aggregate
from kerasdist.backends.torch.fit import backward, batch_norm, batches, updates
from kerasdist.backends.torch.fit.batches import Part
from kerasdist.backends.torch.replica import modules, random
from kerasdist.backends.torch.replica.collectives import Shared, TorchCollectives, check_summable
from kerasdist.backends.torch.replica.functions import running_step
from kerasdist.backends.torch.replica.placing import (
    add_up,
    computing_on,
    move,
    on_device,
    required_tensor,
    torch_device,
)
from kerasdist.backends.torch.replica.random import FirstDraw, StepDraws, part_from_other_gpus
from kerasdist.backends.torch.replica.threads import ReplicaThreads, ThreadSettings
from kerasdist.backends.torch.state import sharded_optimizers, shards
from kerasdist.backends.torch.state.components import Components, LoopRules
from kerasdist.backends.torch.state.host_memory import is_on_host
from kerasdist.backends.torch.state.reads import require_outside
from kerasdist.backends.torch.state.sharded_optimizers import RulesBySize, ShardRules
from kerasdist.backends.torch.state.variables import ReplicaScope, Rules
from kerasdist.backends.torch.workers.buckets import GradientSum, in_buckets
from kerasdist.backends.torch.workers.process_group import Group, ProcessGroup
from kerasdist.backends.torch.workers.worker_data import OwnRowsAdapter, WholeBatchesAdapter
from kerasdist.core.context import current, enclosing_replica, replica_scope
from kerasdist.core.devices import Device
from kerasdist.core.sharding import HeldShard, Sharding
from kerasdist.core.structures import Arguments, flatten, map_leaves, transpose
from kerasdist.errors import ScopeError, UnsupportedError
from kerasdist.input.autoshard import WorkerBatches
from kerasdist.job.job import Job
from kerasdist.job.protocol import Timeouts
from kerasdist.training import layer_losses

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy


@final
class TorchReplicaSet(ReplicaSet):
    """The replicas of a strategy: one replica for each device, which runs in its own thread.

    Threads of one process take turns, but the kernels that a replica has launched on its GPU
    continue to run while the next replica launches its own. In a job each worker has one replica.

    Attributes:
        workers: The collectives between all workers.
        group: With a LayoutMap, the collectives between the workers that have the same position in
            their replicas as this worker. Otherwise the same as `workers`.
        gradient_sum: Sums the workers' gradients after the backward pass; None if there is one
            worker.
        torch_devices: The devices as objects of torch.
        is_plain: Whether one device holds and computes everything, so that Keras's own steps run.
        components: In custom loops, the values of variables whose value differs between replicas,
            for the replicas of this process.
        loop_rules: The rules for reads and writes of variables in custom loops.
        shard_rules: The rules that say which variables are sharded; None if no variable is.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job | None = None,
        *,
        trainer_class: type[Any],
    ) -> None:
        """Makes the replica set. All workers of a job must make theirs, after `connect`."""
        if job is not None and len(devices) != 1:
            raise UnsupportedError(
                "Expected one device a worker on PyTorch, where a process computes on one. "
                f"Received: devices={[str(device) for device in devices]}. Start one worker a "
                f"device: kerasdist run --workers N script.py, or name one: "
                f"devices=[{str(devices[0])!r}]."
            )
        super().__init__(devices, options, job)
        self.trainer_class = trainer_class
        self.torch_devices = [torch_device(device) for device in devices]
        self.timeout = Timeouts.of_environment().meeting
        self._replicas: LocalReplicas | None = None
        self._one_step = threading.Lock()
        self.workers = self.group = Group()
        self.gradient_sum: GradientSum | None = None
        self.shard_rules: ShardRules | None = None
        if job is not None:
            [device] = self.torch_devices
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self.workers = self.group = ProcessGroup(job, device, options.communication)
            if self.divides_state:
                self._divide_state(self.workers, job)
            self.gradient_sum = GradientSum(self.group, job)
        self.gradients_travel_as = self.group.gradients_travel_as
        # On GPUs the host cannot measure how long collectives take, because NCCL's functions return
        # before the collectives are done.
        self.measures_collectives = job is not None and self.on_cpu
        self.components = Components(self.group, self.local_replicas, self.num_replicas)
        self.loop_rules = LoopRules(self.components)
        on_one = len(self.devices) == 1 and self.variable_devices == self.devices
        self.is_plain = job is None and on_one
        if options.offload is not None:
            sharded_optimizers.install()
            updates.install()
        if not self.is_plain:
            for hooks in (modules, batches, random, backward, updates):
                hooks.install()
            if not self.on_cpu:
                batch_norm.install()

    def _divide_state(self, workers: ProcessGroup, job: Job) -> None:
        sharding = self.options.sharding
        if isinstance(sharding, Sharding):
            self.shard_rules = RulesBySize(sharding, workers, job)
            return
        # imported here, because few programs need DTensor
        from kerasdist.backends.torch.state.layouts import LayoutRules

        rules = self.shard_rules = LayoutRules(sharding, workers, job)
        self.group = rules.column

    @cached_property
    def runner(self) -> Runner:
        """The object that runs user functions on the devices."""
        if self.is_plain:
            return SoleRunner(self.placement)
        return TorchRunner(self)

    def free_bytes(self) -> int | None:
        """Returns how much memory is free on the fullest GPU; None if there is no GPU."""
        gpus = [device for device in self.torch_devices if device.type == "cuda"]
        return min(map(_free_bytes, gpus), default=None)

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that yields this worker's rows of arrays.

        For other data, the adapter yields all rows.
        """
        # A model in a replica may call another model's `predict`, whose batches are not divided.
        if self.job is None or current.replica is not None or isinstance(adapter, WorkerBatches):
            return adapter
        if not keras_compat.is_array_adapter(adapter):
            return WholeBatchesAdapter(adapter, self.first_batches)
        if keras_compat.takes_rows(adapter):
            [device] = self.torch_devices
            return OwnRowsAdapter(adapter, self.num_replicas, self.local_replicas.start, device)
        return adapter

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context that computes on the device that holds the variables.

        Code in a replica, which may call another model's `predict`, stays on the replica's device.
        """
        if current.replica is not None:
            return contextlib.nullcontext()
        return computing_on(self.variable_devices[0])

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values; sharded variables keep their own."""
        whole = [variable for variable in variables if shards.shard_of(variable) is None]
        own = [keras_compat.stored_value(variable).detach() for variable in whole]
        # Buckets limit the memory, because a message holds copies of its tensors.
        for members in in_buckets(dict(enumerate(own))):
            some = [own[index] for index in members]
            for mine, sent in zip(some, self.workers.from_chief(some), strict=True):
                chiefs = sent.to(mine.device)  # an offloaded variable is in the host's memory
                # Equal values are not written, because after a write the replicas' own values of
                # the variable are no longer valid.
                if not torch.equal(mine, chiefs):
                    mine.copy_(chiefs)

    def shards(self, variable: keras.Variable) -> list[HeldShard]:
        """Returns, in a list, this worker's shard of a variable; [] if it is not sharded."""
        return shards.held_shards(variable)

    def held(self, variable: keras.Variable) -> tuple[str, str, tuple[int, ...]]:
        """Returns how a variable is divided, why, and the shape of this worker's shard."""
        how, why, shape = super().held(variable)
        shard = shards.shard_of(variable)
        if shard is not None:
            (how, why), shape = shard.described, shard.own_shape
        elif self.shard_rules is not None:
            why = self.shard_rules.why_whole(variable)
        return (f"{how}, on the host", why, (0,)) if is_on_host(variable) else (how, why, shape)

    def checksums(self, variables: Sequence[keras.Variable]) -> list[int]:
        """Returns a checksum of each variable's value, computed on this worker's device.

        A sharded variable gets the checksum of an empty tensor, because the workers' shards differ.
        """
        values = [
            (one if shards.shard_of(variable) is None else one[:0]).detach()
            for variable, one in zip(variables, keras_compat.stored_values(variables), strict=True)
        ]
        device = self.torch_devices[0]
        if self.on_cpu:
            return [checksum_of(one.reshape(-1).view(torch.uint8)) for one in values]
        found = [checksum_on_device(one).to(device) for one in values]
        return torch.stack(found).tolist() if found else []

    def run(
        self, strategy: Strategy, step: Callable[[Any], Any], parts: Sequence[Part], rules: Rules
    ) -> list[Any]:
        """Runs one step on the replicas of this process, each with its local batch.

        Returns each replica's result of the step, ordered by rank.
        """
        outer = enclosing_replica()
        if outer is not None and outer.strategy.replica_set is not self:
            outer = None
        if outer is not None and (rules.is_fit or outer.local_batch is not None):
            raise ScopeError(
                "Expected the replicas to be free. Received: a call of a model's fit, evaluate or "
                "predict in the function of a merge_call, or a call of `run` there in a step of "
                "fit. All replicas wait for that function. Make the call after the step."
            )
        # Several of the user's threads may share a strategy, so only one of them runs a step at a
        # time. If the function of a merge_call calls `run`, its thread already holds the lock.
        with self._one_step if outer is None else contextlib.nullcontext():
            # A `Trial` works on copies of variables, and a `run` in a merge_call is a step inside
            # of a step. So in both cases new replicas are made, with scopes of their own.
            if outer is not None or current.trial is not None:
                return LocalReplicas(self).run(strategy, step, parts, rules)
            if self._replicas is None:
                self._replicas = LocalReplicas(self)
            try:
                return self._replicas.run(strategy, step, parts, rules)
            except BaseException:
                self._replicas = None
                raise


# How many elements `checksum_on_device` takes at a time; each needs 64 bits of memory.
_AT_ONCE = 1 << 22


def checksum_on_device(value: torch.Tensor) -> torch.Tensor:
    """Returns a checksum: a tensor's bits as integers, summed with a factor for each position."""
    words = {1: torch.uint8, 2: torch.int16}.get(value.element_size(), torch.int32)
    bits = value.contiguous().reshape(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for begin in range(0, bits.numel(), _AT_ONCE):
        some = bits[begin : begin + _AT_ONCE].to(torch.int64)
        places = torch.arange(begin, begin + some.numel(), device=value.device)
        factors = (places + 1) * 0x1E3779B97F4A7C15  # wraps around at 64 bits
        total += torch.sum(some * (factors ^ (factors >> 29) | 1))
    return total


def _free_bytes(gpu: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(gpu)
    return free + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)


@final
class LocalReplicas:
    """The replicas of a process: their scopes and collectives, and a thread for each replica.

    If a process has only one replica, that replica runs in the calling thread.
    """

    def __init__(self, replica_set: TorchReplicaSet) -> None:
        home = replica_set.variable_devices[0]
        devices = self._devices = replica_set.devices
        self._elsewhere = replica_set.num_replicas - len(devices)
        rules = replica_set.shard_rules
        in_trial = current.trial is not None  # a trial's steps read copies of full weights
        self._weights = None if rules is None or in_trial else rules.weights
        several = len(devices) > 1
        pairs = zip(replica_set.local_replicas, replica_set.torch_devices, strict=True)
        self._shared = Shared(
            scopes=[
                ReplicaScope(
                    rank,
                    device,
                    copies=device != torch_device(home),
                    is_only=[*devices] == [home],
                    weights=self._weights,
                )
                for rank, device in pairs
            ],
            threads=ReplicaThreads(len(devices), timeout=replica_set.timeout) if several else None,
            group=replica_set.group,
            gradient_sum=replica_set.gradient_sum,
            components=replica_set.components,
            device=home,
            draws=StepDraws(replica_set.local_replicas),
        )
        self._collectives = [TorchCollectives(index, self._shared) for index in range(len(devices))]

    def run(
        self, strategy: Strategy, step: Callable[[Any], Any], parts: Sequence[Part], rules: Rules
    ) -> list[Any]:
        """Runs one step, as `TorchReplicaSet.run` describes."""
        draws, threads = self._shared.draws, self._shared.threads
        draws.begin()
        count = len(parts)
        scopes = self._shared.scopes[:count]
        for scope, part in zip(scopes, parts, strict=True):
            scope.begin(part.weight, rules)
        rules.begin(scopes)
        makes_generator = keras_compat.has_no_seed_generator()
        if makes_generator:
            first_draw = FirstDraw(self._weights)
            keras_compat.set_global_seed_generator(first_draw)
        cores, on_cpu = torch.get_num_threads(), scopes[0].device.type == "cpu"
        on_one_core = threads is not None and on_cpu and rules.is_short(parts[0].argument)
        if on_one_core and rules.takes_turns:
            torch.set_num_threads(1)
        try:
            if threads is None:
                results = [self._step(0, strategy, step, parts, rules)]
            else:
                settings, caller = ThreadSettings(), threading.get_ident()

                def work(index: int) -> Any:
                    if not index:
                        return self._step(index, strategy, step, parts, rules)
                    context = settings.context.copy()
                    if threading.get_ident() == caller:
                        return context.run(self._step, index, strategy, step, parts, rules)
                    if on_one_core:
                        torch.set_num_threads(1)
                    with settings.applied():
                        return context.run(self._step, index, strategy, step, parts, rules)

                results = threads.run(count, work, rules.kept, shares_caller=rules.is_fit)
        finally:
            if on_one_core:  # else threads that start later would also get one core
                torch.set_num_threads(cores)
            if makes_generator:
                keras_compat.set_global_seed_generator(first_draw.generator)
        draws.end()
        rules.end(scopes)
        for scope in scopes:
            scope.end()
        if rules.is_fit and not self._elsewhere:
            layer_losses.hand_over([one.context for one in self._collectives[:count]])
        return results

    def _step(
        self,
        index: int,
        strategy: Strategy,
        step: Callable[[Any], Any],
        parts: Sequence[Part],
        rules: Rules,
    ) -> Any:
        """Runs the step in one replica."""
        scope, part, count = self._shared.scopes[index], parts[index], len(parts)
        replica = self._collectives[index].begin(
            strategy, count + self._elsewhere, count, part.local_batch
        )
        if scope.device.type == "cuda":
            part_from_other_gpus(scope.rank, scope.device)
        with (
            computing_on(self._devices[index]),
            replica_scope(replica),
            scope,
            self._weights.in_step() if self._weights else contextlib.nullcontext(),
        ):
            result = step(part.argument)
            if self._weights is not None:
                result = self._weights.plain(result)
        if not rules.is_fit:
            keras_compat.initialize_waiting_variables()
        return result


@final
class TorchRunner(Runner):
    """Runs a function in each replica of this process.

    A distributed value holds a tensor for each replica of this process. If the process has one
    replica, a plain tensor takes the place of a distributed value.
    """

    def __init__(self, replica_set: TorchReplicaSet) -> None:
        self._replica_set = replica_set
        self._devices = replica_set.torch_devices
        self._group = replica_set.group
        self._home = torch_device(replica_set.variable_devices[0])
        self._components = replica_set.components
        self.places_ahead = not replica_set.on_cpu

    @torch.compiler.disable
    def run(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function once per replica, with that replica's components of the arguments."""
        require_outside(keras_compat.get_stateless_scope())
        outer = running_step.get()
        if outer is not None:
            outer.warn_if_compiled()

        def step(own: Arguments) -> Any:
            return own.call(function)

        self._replica_set.begin_step()
        arguments = [Part(self._component(given, index)) for index in range(len(self._devices))]
        rules = self._replica_set.loop_rules
        return per_replica(self._replica_set.run(strategy, step, arguments, rules))

    @torch.no_grad()
    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> torch.Tensor:
        """Returns the sum or mean over a value's components; if `axis` is given, also over axes."""
        parts = self._tensors(value)
        check_summable(parts)
        count = len(parts)
        if axis is not None:
            axes = [checked_axes(part, axis) for part in parts]
            sizes = [[p.shape[i] for i in some] for p, some in zip(parts, axes, strict=True)]
            count = sum(map(math.prod, sizes))
            # `dtype` is given because torch would sum smaller integers in int64.
            parts = [p.sum(some, dtype=p.dtype) for p, some in zip(parts, axes, strict=True)]
        check_shapes([part.shape for part in parts])
        here = add_up(parts)
        self._group.check_alike("reduce", [here])
        if op is ReduceOp.SUM:
            [total] = self._group.sums([here])
            return total
        # The count is made on the device, to avoid a copy from the host.
        counted = torch.full((), count, device=here.device)
        total, everyones = self._group.sums([here, counted])
        return total / everyones

    @torch.no_grad()
    def gather(self, value: Any, axis: int) -> torch.Tensor:
        """Returns the components of a value, concatenated along an axis."""
        parts = self._tensors(value)
        axes = [checked_axis(part, axis) for part in parts]
        check_shapes([part.shape for part in parts], axes[0])
        here = torch.cat(parts, axes[0])
        [(whole, _)] = self._group.gather("gather", [here], axes[0])
        return whole

    def broadcast(self, tensor: Any) -> Any:
        """Returns the chief's tensor on every replica's device."""
        own = required_tensor(tensor).detach().to(self._home)
        self._group.check_alike("broadcast_to", [own])
        [chiefs] = self._group.from_chief([own])
        if len(self._devices) == 1:
            return chiefs
        return Mirrored(tuple(chiefs.to(device) for device in self._devices))

    def update(
        self, variable: keras.Variable, function: Callable[..., Any], given: Arguments
    ) -> list[Any]:
        """Calls the function once, or once for each replica of this process.

        It is called for each replica if the variable or `given` differs between replicas.
        """

        def call(index: int) -> Any:
            return self._component(given, index).call(function, variable)

        differ = any(isinstance(leaf, PerReplica) for leaf in flatten(given))
        if not (differ or self._components.has(variable)):
            with keras_compat.outside_stateless_scopes():
                return [call(0)]
        results, values = [], []
        for index, component in enumerate(self.copies_of(variable)):
            with keras.StatelessScope([(variable, component)]) as scope:
                results.append(call(index))
            values.append(scope.state_mapping[id(variable)].detach().clone())
        self._components.keep([variable], [values])
        return results

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a distributed value; arrays in it become tensors on the replicas' devices."""
        require_one_each(values, len(values), len(self._devices))
        placed = [
            map_leaves(lambda leaf: on_device(device, leaf), structure)  # noqa: B023
            for device, structure in zip(self._devices, values, strict=True)
        ]
        return placed[0] if len(placed) == 1 else transpose(placed, _values)

    def read(self, variable: keras.Variable) -> torch.Tensor:
        """Returns a variable's value, which is the aggregate if each replica has its own value."""
        require_aggregate(variable)
        return shards.read(variable).detach().clone()

    def copies_of(self, variable: keras.Variable) -> tuple[torch.Tensor, ...]:
        """Returns the values that the replicas of this process would read of a variable."""
        found = [
            self._components.component(variable, rank, device)
            for rank, device in zip(self._replica_set.local_replicas, self._devices, strict=True)
        ]
        return tuple(
            (shards.read(variable) if one is None else one).detach().to(device)
            for one, device in zip(found, self._devices, strict=True)
        )

    def _component(self, structure: Any, index: int) -> Any:
        """Returns a structure with one replica's components, on that replica's device."""
        device = self._devices[index]

        def component(leaf: object) -> Any:
            if isinstance(leaf, DistributedValues):
                require_one_each(leaf, len(leaf.values), len(self._devices))
                leaf = leaf.values[index]
            return move(device, leaf)

        return map_leaves(component, structure)

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        """Returns the components of a value, all on the device that holds the variables."""
        parts = self.local_results(value)
        if isinstance(value, DistributedValues):
            require_one_each(value, len(parts), len(self._devices))
        elif not isinstance(value, keras.Variable):
            parts *= len(self._devices)
        return [required_tensor(part).to(self._home) for part in parts]


def _values(leaves: Sequence[Any]) -> PerReplica | None:
    return None if all(leaf is None for leaf in leaves) else PerReplica(tuple(leaves))
