"""What replicas do on stand-ins for GPUs: prints, as JSON, what each function here has found."""

import contextlib
import json
import os
import traceback
from unittest import mock

import keras
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kerasdist as kd
from kerasdist.backends.torch.fit import batches, fit_rules, gradients
from kerasdist.backends.torch.replica import placing, random, replicas, threads
from kerasdist.backends.torch.state import states, variables
from kerasdist.backends.torch.workers import process_group
from kerasdist.backends.torch.workers.buckets import in_buckets
from kerasdist.core.devices import Device
from tests.accelerators import torch_waits

told = {}
META = torch.device("meta")


def case(function):
    try:
        told[function.__name__] = function()
    except BaseException:  # noqa: BLE001  the test shows it
        told[function.__name__] = traceback.format_exc()


@case
def rows_are_on_the_replicas_device():
    batch = {"x": torch.ones(5, 2), "rate": torch.tensor(0.5), "names": ["a"]}
    parts = batches.divide(batch, 2, range(2), [torch.device("cpu"), META])
    return [
        [part.argument["x"].device.type, part.argument["rate"].device.type, len(part.argument["x"])]
        for part in parts
    ]


@case
def cuda_means_the_replicas_gpu():
    current = []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    with mock.patch.object(torch.cuda, "device", device):
        with placing.computing_on(Device("gpu", 3)):
            inside = [*current, keras.src.backend.torch.core.get_device()]
        return [inside, current]


@case
def steps_compute_on_their_device():
    on = []

    @contextlib.contextmanager
    def computing_on(device):
        on.append(str(device))
        with keras.device("cpu"):
            yield

    with mock.patch.object(replicas, "computing_on", computing_on):
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        on.clear()
        strategy.run(lambda: None)
        return sorted(on)


class Stand_ins(contextlib.ExitStack):
    # Generators of the CPU for those of a machine's GPUs, which torch.manual_seed seeds alike.
    def __init__(self, count):
        super().__init__()
        self.generators = generators = [torch.Generator() for _ in range(count)]
        fakes = {
            "default_generators": generators,
            "is_initialized": lambda: True,
            "get_rng_state_all": lambda: [one.get_state() for one in generators],
            "set_rng_state_all": lambda all: [
                one.set_state(state) for one, state in zip(generators, all, strict=True)
            ],
        }
        self.enter_context(mock.patch.multiple(torch.cuda, **fakes))

    def seed(self, seed):
        torch.manual_seed(seed)
        for generator in self.generators:
            generator.manual_seed(seed)

    def draw(self, rank, index):
        random.part_from_other_gpus(rank, torch.device("cuda", index))
        return torch.rand(4, generator=self.generators[index]).tolist()


@case
def masks_differ_by_replica():
    with Stand_ins(3) as gpus:
        found = {}
        for name, order in {"in order": (0, 1, 2), "in another order": (1, 0, 2)}.items():
            gpus.seed(5)
            steps = [[gpus.draw(r, order[r]) for r in range(3)] for _ in range(2)]
            gpus.seed(5)  # as the user may do after the strategy was made
            again = [gpus.draw(r, order[r]) for r in range(3)]
            different = {tuple(one) for step in steps for one in step}
            found[name] = [len(different), again == steps[0]]
        return found


@case
def masks_differ_by_worker():
    masks = []
    for rank in range(2):
        with Stand_ins(1) as gpu:  # each worker sees one GPU, its first
            gpu.seed(5)
            masks.append([gpu.draw(rank, 0) for _ in range(2)])
    return masks[0] != masks[1] and masks[1][0] != masks[1][1]


@case
def a_restart_draws_what_the_interrupted_run_would_have_drawn():
    found = []
    for rank in range(2):
        with Stand_ins(1) as gpu:
            gpu.seed(5)
            gpu.draw(rank, 0)
            kept = states.random_state(), states.gpu_random_states()
            expected = [gpu.draw(rank, 0) for _ in range(2)]
        with Stand_ins(1) as gpu:  # another process, seeded otherwise
            gpu.seed(8)
            states.set_random_state(kept[0])
            states.set_gpu_random_states(kept[1])
            found.append(expected == [gpu.draw(rank, 0) for _ in range(2)])
    return found


class Copies(TorchDispatchMode):
    # Counts what is copied from one device to another.
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            self.count += result.device != args[0].device
        elif name == "copy_":
            self.count += args[0].device != args[1].device
        elif name == "_foreach_copy_":
            self.count += sum(a.device != b.device for a, b in zip(args[0], args[1], strict=True))
        return result


class Variable:
    overwrite_with_gradient = False

    def __init__(self, aggregation="none"):
        self.aggregation = aggregation


def tensors(count, device):
    return [torch.ones(3, 1 + i, device=device) for i in range(count)]


@case
def copies_of_gradients():
    found = []
    for count in (2, 20):
        with FakeTensorMode(), Copies() as copies:
            given = [tensors(count, f"cuda:{rank}") for rank in range(3)]
            gradients.weighted_sum(given, [0.5, 0.25, 0.25], [Variable()] * count)
            gradients.weighted_sum(given, [1.0, 1.0, 1.0], [Variable()] * count)
        found.append(copies.count)
    return found


@case
def copies_of_variables():
    found = []
    for count in (2, 20):
        with FakeTensorMode(), Copies() as copies:
            home = tensors(count, "cuda:0")
            device = torch.device("cuda:1")
            aliases = [variables.Alias(Variable(), one, None, device, is_copy=True) for one in home]
            with torch.no_grad():
                for one in home:
                    one.add_(1)
            copies.count = 0
            variables.update([one for one in aliases if one.outdated], device)
            found.append([copies.count, any(one.outdated for one in aliases)])
    return found


@case
def copies_of_what_replicas_assign():
    found = []
    for count in (2, 20):
        with FakeTensorMode(), Copies() as copies:
            scopes = [
                variables.ReplicaScope(rank, torch.device("cuda", rank), copies=rank > 0)
                for rank in range(2)
            ]
            written = dict(enumerate(Variable("sum") for _ in range(count)))
            for scope in scopes:
                scope.written.update(written)
                scope.state_mapping.update(enumerate(tensors(count, scope.device)))
            fit_rules.combined(scopes, written, tensors(count, "cuda:0"))
        found.append(copies.count)
    return found


class Row(torch.Tensor):
    # A tensor on the host that says how it travels to a GPU.
    device = torch.device("cpu")

    def pin_memory(self):
        log.append(f"pin {self.number}")
        return self

    def to(self, device, non_blocking):
        log.append(f"copy {self.number} in {streams[-1]}" + " and wait" * (not non_blocking))
        return self

    def record_stream(self, stream):
        log.append(f"{self.number} used in {stream}")


log, streams = [], ["compute"]


class FakeStream:
    def __init__(self, name="side"):
        self.name = name

    def __str__(self):
        return self.name

    def record_event(self):
        return f"event after {log[-1]}"

    def wait_event(self, event):
        log.append(f"{self.name} waits for {event}")


@contextlib.contextmanager
def in_stream(stream):
    streams.append(str(stream))
    yield
    streams.pop()


@case
def rows_travel_ahead():
    from kerasdist.backends.torch.workers import worker_data
    from kerasdist.input.sharding import WorkerShard

    log.clear()
    fakes = {
        "Stream": lambda device: FakeStream(),
        "stream": in_stream,
        "current_stream": lambda device: FakeStream("compute"),
    }

    def batches():
        for number in range(3):
            row = torch.ones(2).as_subclass(Row)
            row.number = number
            yield WorkerShard((row, None), 2, 4, 0, 2) if number else (row, None)

    with mock.patch.multiple(torch.cuda, **fakes):
        for number, batch in enumerate(worker_data.ahead(batches(), torch.device("cuda", 0))):
            rows = batch.rows if number else batch
            assert rows[0].number == number
            assert rows[1] is None
            log.append(f"step {number}")
    return log


@case
def meetings_of_a_step():
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    original, met = threads.ThreadPool.meet, []

    def meet(self, rank, label, *args):
        met.append(label)
        return original(self, rank, label, *args)

    threads.ThreadPool.meet = meet
    found = []
    for layers in (1, 10):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), *map(keras.layers.Dense, [4] * layers)])
            model.compile("adam", "mse", metrics=["mae"])
        x = np.ones((8, 3), "float32")
        model.fit(x, np.ones((8, 4), "float32"), batch_size=4, verbose=0)
        met.clear()
        model.train_on_batch(x, np.ones((8, 4), "float32"))
        found.append(len(met))
    return found


@case
def the_first_broadcast_is_in_parts():
    mib = 2**18  # floats
    sizes = [mib, 30 * mib, 20 * mib, 4 * mib, mib]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    buckets = in_buckets(dict(enumerate(tensors)))
    return [[tensors[index].numel() // mib for index in members] for members in buckets]


@case
def nccl_leaves_errors_to_the_job():
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    found = []
    for given in (None, "3"):
        os.environ.pop(name, None)
        if given is not None:
            os.environ[name] = given
        process_group._let_the_job_name_lost_workers()
        found.append(os.environ[name])
    return found


told["waits"] = torch_waits.of_process()
print(json.dumps(told))
