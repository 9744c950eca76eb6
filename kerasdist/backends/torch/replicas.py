"""The replicas of a strategy on PyTorch, and how they take a step together."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.base import ReplicaOptions, ReplicaSet
from kerasdist.backends.runner import Runner
from kerasdist.backends.sole import SoleRunner
from kerasdist.backends.torch import (
    batch_norm,
    convolutions,
    draws,
    fused_adam,
    masks,
    modules,
    rendezvous,
)
from kerasdist.backends.torch.collectives import TorchCollectives
from kerasdist.backends.torch.components import Components, LoopRules
from kerasdist.backends.torch.draws import FirstDraw, StepDraws, part_from_first_gpu
from kerasdist.backends.torch.host_memory import keep_freed_memory
from kerasdist.backends.torch.pace import TakeTurns
from kerasdist.backends.torch.pieces import Part
from kerasdist.backends.torch.placing import keras_name, torch_device
from kerasdist.backends.torch.team import Team
from kerasdist.backends.torch.thread_settings import ThreadSettings, compute_with
from kerasdist.backends.torch.variables import FIT, ReplicaScope, Rules, commit_buffers
from kerasdist.devices import Device
from kerasdist.errors import ScopeError
from kerasdist.replica_context import ReplicaContext
from kerasdist.training import layer_losses

if TYPE_CHECKING:
    from kerasdist.backends.torch.steps import Steps
    from kerasdist.backends.trial import Trial
    from kerasdist.strategy import Strategy


@final
class TorchReplicaSet(ReplicaSet):
    """Devices, and a thread for each that lives as long as this object.

    Replicas run at the same time or take turns, as their `Pace` says.
    """

    def __init__(self, devices: Sequence[Device], options: ReplicaOptions) -> None:
        """Makes the set.

        Args:
            devices: Devices of this machine, all of one kind.
            options: How to compute.
        """
        super().__init__(devices, options)
        self.timeout = rendezvous.TIMEOUT_SECONDS
        self._crew: Crew | None = None
        self._one_step = threading.Lock()
        self.components = Components(len(self.devices))
        if len(self.devices) > 1:
            modules.install()
            masks.install()
            draws.install()
            fused_adam.install()
            convolutions.install()
            batch_norm.install()

    @property
    def on_cpu(self) -> bool:
        """Whether all replicas are on the CPU, and share it."""
        return all(device.kind == "cpu" for device in self.devices)

    @cached_property
    def runner(self) -> Runner:
        """How user functions run on the devices."""
        if self.num_replicas == 1:
            return SoleRunner(self.placement)
        from kerasdist.backends.torch.runner import TorchRunner

        return TorchRunner(self)

    @property
    def trainer_class(self) -> type[Any]:
        """The class that is put in front of a model's own."""
        from kerasdist.backends.torch.trainer import TorchTrainer  # it needs this file

        return TorchTrainer

    def steps(self, model: Any) -> Steps:
        """Returns how a model's steps run on the devices.

        Args:
            model: A model with the trainer of `trainer_class`.
        """
        from kerasdist.backends.torch.steps import SoleSteps, ThreadSteps  # they need this file

        return SoleSteps() if self.num_replicas == 1 else ThreadSteps(model)

    def trial(self, model: Any) -> Trial:
        """Returns what a training step is tried with.

        Args:
            model: A model with the trainer of `trainer_class`.
        """
        if self.num_replicas == 1:
            return super().trial(model)
        from kerasdist.backends.torch.trial import TorchTrial  # few programs need it

        return TorchTrial(model)

    def data_adapter(self, adapter: Any) -> Any:
        """Returns the adapter itself: global batches are divided when a step begins.

        Args:
            adapter: The adapter that Keras made.
        """
        return adapter

    def placement(self) -> AbstractContextManager[Any]:
        """Returns Keras's scope of the first device, which holds the variables.

        In a replica, where a model may call another one's `predict`, its own device stays in force.
        """
        if context.replica() is not None:
            return contextlib.nullcontext()
        return keras.device(keras_name(self.variable_devices[0]))

    def run(
        self,
        strategy: Strategy,
        step: Callable[[Any], Any],
        parts: Sequence[Part],
        take_turns: TakeTurns,
    ) -> list[Any]:
        """Runs one step on every replica that has a part in it, and writes what they assigned.

        Args:
            strategy: The strategy that owns this set.
            step: What a replica does with its argument.
            parts: What the replicas get, all with a share of a batch or all without.
            take_turns: Whether the replicas take turns.

        Returns:
            What the step returned in each replica, in the order of ranks.

        Raises:
            ScopeError: In the function of a `merge_call`.
            Exception: What `step` raised in the first replica that failed.
        """
        outer = context.enclosing_replica()
        if outer is not None and outer.strategy.replica_set is self:
            raise ScopeError(
                "Expected the replicas to be free. Received: a call of `run`, or of a model's fit, "
                "evaluate or predict, in the function of a merge_call, for which they all wait. "
                "Call it after `run` has returned."
            )
        with self._one_step:  # two threads may use one strategy, one after the other
            crew = self._crew
            if crew is None:
                crew = self._crew = Crew(self)
                weakref.finalize(self, crew.team.close)
            try:
                return crew.run(strategy, step, parts, take_turns)
            finally:
                if crew.team.spent:
                    crew.team.close()
                    self._crew = None


@final
class Crew:
    """The replicas' threads and what each of them keeps from step to step."""

    def __init__(self, replica_set: TorchReplicaSet) -> None:
        """Starts the threads.

        Args:
            replica_set: The devices, and what is kept of the replicas' variables.
        """
        devices = replica_set.devices
        home = keras_name(replica_set.variable_devices[0])
        self._on_cpu = replica_set.on_cpu
        if self._on_cpu:
            keep_freed_memory()
        self._draws = StepDraws(len(devices))
        self.team = Team(len(devices), timeout=replica_set.timeout)
        names = [keras_name(device) for device in devices]
        scopes = [
            ReplicaScope(rank, torch_device(device), copies=names[rank] != home)
            for rank, device in enumerate(devices)
        ]
        build_lock = threading.RLock()
        self._replicas = [
            Replica(
                rank,
                names[rank],
                scopes[rank],
                TorchCollectives(
                    rank,
                    rendezvous=self.team.rendezvous,
                    scopes=scopes,
                    device=home,
                    draws=self._draws,
                    build_lock=build_lock,
                ),
            )
            for rank in range(len(devices))
        ]
        self._loop_rules = LoopRules(replica_set.components, functools.partial(_initialize, home))

    def run(
        self,
        strategy: Strategy,
        step: Callable[[Any], Any],
        parts: Sequence[Part],
        take_turns: TakeTurns,
    ) -> list[Any]:
        """Runs one step (see `TorchReplicaSet.run`).

        Args:
            strategy: The strategy.
            step: What a replica does with its argument.
            parts: What the replicas get.
            take_turns: Whether the replicas take turns.
        """
        self._draws.begin()
        with take_turns(parts, self._draws) as turns:
            return self._run(strategy, step, parts, turns=turns)

    def _run(
        self, strategy: Strategy, step: Callable[[Any], Any], parts: Sequence[Part], *, turns: bool
    ) -> list[Any]:
        replicas = self._replicas[: len(parts)]
        rules: Rules = self._loop_rules if parts[0].share is None else FIT
        generator = keras_seam.global_seed_generator()
        if generator is None:
            first_draw = FirstDraw()
            keras_seam.set_global_seed_generator(first_draw)
        settings = ThreadSettings.of_this_thread()
        threads = torch.get_num_threads()
        share = threads if turns or not self._on_cpu else max(1, threads // len(parts))

        def work(rank: int) -> Any:
            compute_with(share)
            if rank == 0:
                return replicas[0].take_step(strategy, step, parts, rules)
            with settings.applied():
                return replicas[rank].take_step(strategy, step, parts, rules)

        try:
            results = self.team.run(len(parts), work, turns=turns)
        finally:
            compute_with(threads)
            if generator is None:
                keras_seam.set_global_seed_generator(first_draw.generator)
        scopes = [replica.scope for replica in replicas]
        rules.commit(scopes, sums=True)
        if scopes[0].buffers:
            commit_buffers(scopes)
        for scope in scopes:
            scope.end()
        told = [replica.context for replica in replicas if replica.context is not None]
        if rules is FIT and told[0].layer_losses:
            layer_losses.hand_over(told)
        return results


@dataclass(eq=False)
class Replica:
    """One replica: its device, its view of the variables, its way to the others.

    Attributes:
        rank: Its number.
        device: Keras's name of its device.
        scope: Its view of the variables.
        collectives: Its way to the others.
        context: What code of its last step was told of it.
    """

    rank: int
    device: str
    scope: ReplicaScope
    collectives: TorchCollectives
    context: ReplicaContext | None = None

    def take_step(
        self, strategy: Strategy, step: Callable[[Any], Any], parts: Sequence[Part], rules: Rules
    ) -> Any:
        """Runs a step on this replica's part, in the thread that is this replica's.

        Args:
            strategy: The strategy.
            step: What to do with the argument.
            parts: What the replicas get.
            rules: What reads and writes of variables mean.
        """
        part_from_first_gpu(self.rank, self.scope.device)
        part = parts[self.rank]
        told = self._told(strategy, part, len(parts))
        self.scope.begin(part.weight, rules)
        self.collectives.begin(len(parts), part.weight)
        with keras.device(self.device), context.replica_scope(told), self.scope:
            result = step(part.argument)
        if rules is not FIT:
            keras_seam.initialize_waiting_variables()
        return result

    def _told(self, strategy: Strategy, part: Part, count: int) -> ReplicaContext:
        """The context of this step: the last one's, if it fits, since most batches are alike."""
        last = self.context
        if (
            last is not None
            and last.strategy is strategy
            and last.num_replicas_in_sync == count
            and last.share == part.share
        ):
            last.layer_losses.clear()
            return last
        self.context = ReplicaContext(
            strategy=strategy,
            replica_id_in_sync_group=self.rank,
            num_replicas_in_sync=count,
            collectives=self.collectives,
            share=part.share,
        )
        return self.context


def _initialize(home: str, variable: Any) -> None:
    """Gives its value to a variable that a symbolic call made, on the device of the variables."""
    with context.replica_scope(None), keras.device(home):
        keras_seam.initialize_waiting_variable(variable)
