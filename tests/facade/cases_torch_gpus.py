"""What replicas do on GPUs on PyTorch, where stand-ins for GPUs can show it."""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import numpy as np

from tests import environment
from tests.conformance.lazy import LazyModule, kd, keras, torch
from tests.facade.case import of_backend

BACKEND = "kerasdist.backends.torch"
batches = LazyModule(f"{BACKEND}.fit.batches")
fit_rules = LazyModule(f"{BACKEND}.fit.fit_rules")
gradients = LazyModule(f"{BACKEND}.fit.gradients")
placing = LazyModule(f"{BACKEND}.replica.placing")
random = LazyModule(f"{BACKEND}.replica.random")
threads = LazyModule(f"{BACKEND}.replica.threads")
variables = LazyModule(f"{BACKEND}.state.variables")
workers = LazyModule(f"{BACKEND}.workers.buckets")
process_group = LazyModule(f"{BACKEND}.workers.process_group")
worker_data = LazyModule(f"{BACKEND}.workers.worker_data")
devices = LazyModule("kerasdist.core.devices")
random_states = LazyModule("kerasdist.backends.base.random_states")
core = LazyModule("keras.src.backend.torch.core")
case = of_backend("torch")


@case
def rows_are_on_the_replicas_device(strategy):
    batch = {"x": torch.ones(5, 2), "rate": torch.tensor(0.5), "names": ["a"]}
    devices = [torch.device("cpu"), torch.device("meta")]
    two = SimpleNamespace(num_replicas=2, local_replicas=range(2), torch_devices=devices)
    parts = [part.argument for part in batches.divide(batch, two)]
    assert [one["x"].device.type for one in parts] == ["cpu", "meta"]
    assert [one["rate"].device.type for one in parts] == ["cpu", "meta"]
    assert [len(one["x"]) for one in parts] == [3, 2]


@case
def cuda_means_the_replicas_gpu(strategy):
    current = []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    with mock.patch.object(torch.cuda, "device", device):
        with placing.computing_on(devices.Device("gpu", 3)):
            assert current == [3]
            assert core.get_device() == "cuda"  # for which Keras has an integer matmul
        assert current == []


@case
def steps_compute_on_their_device(strategy):
    on = []

    @contextlib.contextmanager
    def computing_on(device):
        on.append(str(device))
        with keras.device("cpu"):
            yield

    with mock.patch(f"{BACKEND}.replica.replicas.computing_on", computing_on):
        made = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        on.clear()
        made.run(lambda: None)
    assert sorted(on) == ["cpu:0", "cpu:0", "cpu:1"]


class StandIns(contextlib.ExitStack):
    """Generators of the CPU for those of a machine's GPUs, which torch.manual_seed seeds alike."""

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
def masks_differ_by_replica(strategy):
    with StandIns(3) as gpus:
        for order in ((0, 1, 2), (1, 0, 2)):
            gpus.seed(5)
            steps = [[gpus.draw(r, order[r]) for r in range(3)] for _ in range(2)]
            gpus.seed(5)  # as the user may do after the strategy was made
            again = [gpus.draw(r, order[r]) for r in range(3)]
            assert len({tuple(one) for step in steps for one in step}) == 6
            assert again == steps[0]


@case
def a_restart_draws_what_the_interrupted_run_would_have_drawn(strategy):
    """Each worker sees one GPU; the workers' masks differ."""
    masks = []
    for rank in range(2):
        with StandIns(1) as gpu:
            gpu.seed(5)
            gpu.draw(rank, 0)
            kept = random_states.kept(), random_states.of_gpus()
            masks.append([gpu.draw(rank, 0) for _ in range(2)])
        with StandIns(1) as gpu:  # another process, seeded otherwise
            gpu.seed(8)
            random_states.put_back(kept[0])
            random_states.put_back_gpus(kept[1])
            assert masks[rank] == [gpu.draw(rank, 0) for _ in range(2)]
    assert len({tuple(one) for each in masks for one in each}) == 4


def counted_copies():
    """Counts in a block of stand-ins for tensors what is copied from one device to another."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name == "_to_copy":
                self.count += result.device != args[0].device
            elif name == "copy_":
                self.count += args[0].device != args[1].device
            elif name == "_foreach_copy_":
                pairs = zip(args[0], args[1], strict=True)
                self.count += sum(one.device != other.device for one, other in pairs)
            return result

    stack = contextlib.ExitStack()
    stack.enter_context(FakeTensorMode())
    return stack, stack.enter_context(Copies())


class Variable:
    overwrite_with_gradient = False

    def __init__(self, aggregation="none"):
        self.aggregation = aggregation


def tensors(count, device):
    return [torch.ones(3, 1 + i, device=device) for i in range(count)]


def copies_of_gradients(count, copies):
    given = [tensors(count, f"cuda:{rank}") for rank in range(3)]
    for weights in ([0.5, 0.25, 0.25], [1.0, 1.0, 1.0]):
        gradients.weighted_sum(given, weights, [Variable()] * count, torch.device("cuda:0"))


@case
def gradients_are_summed_where_variables_are(strategy):
    with counted_copies()[0]:
        for home in (torch.device("cpu"), torch.device("cuda:1")):
            for weights in ([1.0], [0.5], [0.5, 0.25, 0.25]):
                given = [[*tensors(2, f"cuda:{rank}"), None] for rank in range(len(weights))]
                *sums, none = gradients.weighted_sum(given, weights, [Variable()] * 3, home)
                assert [one.device for one in sums] == [home] * 2
                assert none is None


def copies_of_variables(count, copies):
    home = tensors(count, "cuda:0")
    device = torch.device("cuda:1")
    aliases = [variables.Alias(Variable(), one, None, device, is_copy=True) for one in home]
    with torch.no_grad():
        for one in home:
            one.add_(1)
    copies.count = 0
    variables.update([one for one in aliases if one.outdated], device)
    assert not any(one.outdated for one in aliases)


def copies_of_what_replicas_assign(count, copies):
    scopes = [
        variables.ReplicaScope(rank, torch.device("cuda", rank), copies=rank > 0)
        for rank in range(2)
    ]
    written = dict(enumerate(Variable("sum") for _ in range(count)))
    for scope in scopes:
        scope.written.update(written)
        scope.state_mapping.update(enumerate(tensors(count, scope.device)))
    fit_rules.combined(scopes, written, tensors(count, "cuda:0"), lambda _: False)


@case
def copies_do_not_grow_with_the_model(strategy):
    for copied, expected in (
        (copies_of_gradients, 4),  # two replicas elsewhere, two sums
        (copies_of_variables, 1),
        (copies_of_what_replicas_assign, 1),
    ):
        for count in (2, 20):
            stack, copies = counted_copies()
            with stack:
                copied(count, copies)
            assert copies.count == expected, copied


@case
def rows_travel_ahead(strategy):
    """Records in which CUDA stream the rows are copied, computed on and waited for."""
    log, current = [], ["compute"]

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            return f"event after {log[-1]}"

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream.name)
        yield
        current.pop()

    def pin(row):
        log.append(f"pin {int(row[0])}")
        return row

    def copy(row, device, *, non_blocking):
        assert non_blocking
        log.append(f"copy {int(row[0])} in {current[-1]}")
        return row

    def record(row, stream):
        log.append(f"{int(row[0])} used in {stream.name}")

    def batches():
        for number in range(3):
            yield (torch.full((2,), number), None), 4

    streams = {
        "Stream": lambda device: Stream("side"),
        "stream": entered,
        "current_stream": lambda device: Stream("compute"),
    }
    with (
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch.multiple(torch.Tensor, pin_memory=pin, to=copy, record_stream=record),
    ):
        for number, batch in enumerate(worker_data.ahead(batches(), torch.device("cuda", 0))):
            assert (batch[0][1], batch[1]) == (None, 4)
            log.append(f"step {number}")

    def ahead(number):
        return [f"pin {number}", f"copy {number} in side"]

    def used(number):
        waits = f"compute waits for event after copy {number} in side"
        return [waits, f"{number} used in compute", f"step {number}"]

    assert log == [*ahead(0), *ahead(1), *used(0), *ahead(2), *used(1), *used(2)]


@case
def the_meetings_of_a_step_do_not_grow_with_the_model(strategy):
    original, met, found = threads.ReplicaThreads.meet, [], []

    def meet(self, rank, label, *args, **options):
        met.append(label)
        return original(self, rank, label, *args, **options)

    with mock.patch.object(threads.ReplicaThreads, "meet", meet):
        for layers in (1, 10):
            with strategy.scope():
                hidden = map(keras.layers.Dense, [4] * layers)
                model = keras.Sequential([keras.Input((3,)), *hidden])
                model.compile("adam", "mse", metrics=["mae"])
            x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
            model.fit(x, y, batch_size=4, verbose=0)
            met.clear()
            model.train_on_batch(x, y)
            found.append(len(met))
    assert found[0] == found[1] > 0


@case
def the_first_broadcast_is_in_parts(strategy):
    mib = 2**18  # floats
    sizes = [mib, 30 * mib, 20 * mib, 4 * mib, mib]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    buckets = workers.in_buckets(dict(enumerate(tensors)))
    found = [[tensors[index].numel() // mib for index in members] for members in buckets]
    assert found == [[1], [30], [20, 4, 1]]


@case
def nccl_leaves_errors_to_the_job(strategy):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for given, expected in ((None, "0"), ("3", "3")):
        with environment.variables(**({} if given is None else {name: given})):
            if given is None:
                os.environ.pop(name, None)
            process_group._let_the_job_name_lost_workers()
            assert os.environ[name] == expected
