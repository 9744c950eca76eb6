"""Checkpoints of Orbax (JAX) and of torch.distributed.checkpoint: ours, and those of users."""

import contextlib
import re
import resource
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.cases_sharding import even
from tests.conformance.lab import fresh, optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case
from tests.environment import find_orbax

TOPIC = "saving"
X, Y = regression(16, outputs=4)
TRAIN = fit(X, Y, batch_size=8, shuffle=False)
REFUSED = {"tensorflow": ("UnsupportedError", "the backend tensorflow.*tf.train.Checkpoint")}


def new(strategy=None, build=even):
    """A model whose layers have the names of every other one that this makes."""
    fresh()
    with strategy.scope() if strategy else contextlib.nullcontext():
        return build()


def state(model):
    return [*values(model.weights), *optimizer_values(model)]


def same(one, other):
    assert len(one) == len(other)
    for expected, actual in zip(one, other, strict=True):
        np.testing.assert_array_equal(expected, actual)


def large():
    return stack([keras.layers.Dense(20_000, name="up")])


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Lets this process's writes fail as on a full disk, beyond a size of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# How errors of a full disk name a variable and a file. Orbax writes several variables at once.
_PLACE = {
    "jax": r'Error writing "[a-z_]+_variables\.[\w.]+/.*Failed writing: ".*/one.orbax.*/d/',
    "torch": r"too large, at the variable 'sequential/up/kernel' in '.*/one/__0_0.distcp'",
}


def orbax() -> Any:
    find_orbax()
    return import_module("orbax.checkpoint")


def write_plainly(lab, path: Path, tree: dict[str, Any]):
    """Writes as a program without kerasdist does."""
    if lab.backend == "jax":
        with orbax().StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
    else:
        import_module("torch.distributed.checkpoint").save(tree, checkpoint_id=path, no_dist=True)


def read_plainly(lab, path: Path, model: Any):
    """Reads as a program without kerasdist does."""
    if lab.backend == "jax":
        with orbax().StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(path)
    else:
        model.optimizer.build(model.trainable_variables)
        tree = model.get_state_tree()
        load = import_module("torch.distributed.checkpoint").load
        load(tree, checkpoint_id=path, no_dist=True)
    model.set_state_tree(tree)


@case(TOPIC, replicas=(2,), refused=REFUSED)
def written_and_read(lab):
    """`save_checkpoint`, `load_checkpoint`: bit by bit, into each sharding and plain programs."""
    find_orbax()
    strategies = [lab.strategy(), None]
    if lab.backend == "jax":
        strategies.append(lab.strategy(sharding=kd.Sharding("full", min_size=1)))
    first = model = new(strategies[0])
    with lab.folder() as folder:
        path = folder / "steps" / "last"
        kd.save_checkpoint(model, path)
        TRAIN(model)
        kept = state(model)
        for strategy in [*strategies[1:], *strategies]:  # from each, and into each
            kd.save_checkpoint(model, path)
            assert [one.name for one in path.parent.iterdir()] == ["last"]
            model = new(strategy)
            kd.load_checkpoint(model, path)
            same(kept, state(model))
        plain = new()
        plain.optimizer.build(plain.trainable_variables)
        read_plainly(lab, path, plain)
        same(kept, state(plain))
    more = TRAIN(plain)
    lab.equal(more, TRAIN(first))
    lab.equal(more, TRAIN(model))


@case(TOPIC, replicas=(2,), refused=REFUSED, like="checkpoints.written_and_read")
def of_users(lab):
    """Users' checkpoints start a model: a state tree, variables by path, Keras's own callback."""
    find_orbax()
    if lab.backend == "tensorflow":
        kd.load_checkpoint(new(), "none")
    plain = new(build=lambda: dense("adam"))
    plain.fit(X, Y[:, :1], verbose=0)
    kept = state(plain)
    by_path = {one.path: one.value for one in plain.variables}
    with lab.folder() as folder:
        write_plainly(lab, folder / "tree", plain.get_state_tree())
        write_plainly(lab, folder / "paths", by_path)
        paths, weights_alone = [folder / "tree"], [folder / "paths"]
        if lab.backend == "jax":
            orbax().PyTreeCheckpointer().save(folder / "in_model", {"model": by_path, "step": 3})
            if "OrbaxCheckpoint" in dir(keras.callbacks):  # since Keras 3.13
                callback = keras.callbacks.OrbaxCheckpoint(folder / "own", save_on_background=False)
                callback.set_model(plain)
                callback.on_epoch_end(5)
                callback.on_train_end()
                paths.append(folder / "own" / "5")
        else:
            write_plainly(lab, folder / "in_model", {"model": plain.state_dict(), "step": 3})
        weights_alone.append(folder / "in_model")
        for path in [*paths, *weights_alone]:
            model = new(lab.strategy(), lambda: dense("adam"))
            kd.load_checkpoint(model, path)
            if path in paths:
                same(kept, state(model))
            else:
                same(values(plain.weights), values(model.weights))
                assert not model.optimizer.built
        model = new(lab.strategy(), lambda: dense("sgd"))
        kd.load_checkpoint(model, paths[0], weights_only=True)
        same(values(plain.weights), values(model.weights))


@case(TOPIC, replicas=(2,), refused=REFUSED, like="checkpoints.written_and_read")
def that_do_not_fit(lab):
    """What does not fit changes no variable; what cannot be written leaves the old checkpoint."""
    find_orbax()
    strategy = lab.strategy()
    model = new(strategy)
    TRAIN(model)
    layers = keras.layers
    with lab.folder() as folder:
        path = folder / "one"
        if lab.backend == "jax":
            with (
                mock.patch.dict(sys.modules, {"orbax.checkpoint": None}),
                lab.raises(kd.errors.UnsupportedError, "pip install orbax-checkpoint"),
            ):
                kd.save_checkpoint(model, path)
        kd.save_checkpoint(model, path)

        def refused(build, message, path=path):
            other = new(strategy, build)
            before = values(other.weights)
            with lab.raises(ValueError, message):
                kd.load_checkpoint(other, path)
            same(before, values(other.weights))

        def wider():
            return stack([layers.Dense(8, name="up"), layers.Dense(5, name="down")])

        shapes = r"/one', .*'sequential/down/kernel' of shape \(8, 5\), which is \(8, 4\) there"
        refused(wider, shapes)
        refused(lambda: stack([layers.Dense(8, name="else")]), "else/kernel', which is not there")
        refused(lambda: dense("sgd"), "Name the folder of one step", folder)
        with lab.raises(ValueError, "a checkpoint to replace"):
            kd.save_checkpoint(model, folder)

        kept, larger = state(model), new(strategy, large)
        try:
            with files_of_at_most(1 << 17):
                kd.save_checkpoint(larger, path)
        except Exception as error:  # noqa: BLE001 (which one, the libraries choose)
            text, notes = str(error), error.__notes__
        assert any("before is unchanged" in one for one in notes), notes
        lab.check(re.search(_PLACE[lab.backend], text), text)
        assert [one.name for one in folder.iterdir()] == ["one"]
        model = new(strategy)
        kd.load_checkpoint(model, path)
        same(kept, state(model))
        kd.save_checkpoint(larger, path)
        assert [one.name for one in folder.iterdir()] == ["one"]
        if lab.backend == "torch":  # a file says how many bytes it should have
            [file] = path.glob("*.distcp")
            with file.open("r+b") as short:
                short.truncate(20_000)
            refused(large, r"'sequential/up/kernel', since '__0_0.distcp' has 20000 bytes of at")


@case(TOPIC, replicas=(2,), like="checkpoints.written_and_read")
def on_a_full_disk(lab):
    """Files that a full disk does not take: the error has variable and file, the old ones stay."""
    small, larger = new(lab.strategy()), new(lab.strategy(), large)
    where = r"File too large, at the variable 'sequential/up/kernel', in: '.*/one"
    with lab.folder() as folder:
        small.save_weights(folder / "one.weights.h5")
        small.save(folder / "one.keras")
        shards = (folder / "shards").resolve()
        shards.mkdir()
        small.save_weights(shards / "one.weights.json", max_shard_size=2e-7)
        before = {one: one.read_bytes() for one in folder.rglob("one*")}
        lab.check(len(before) > 5, str(before.keys()))
        with files_of_at_most(1 << 17):
            with lab.raises(OSError, rf"{where}.weights.h5'"):
                larger.save_weights(folder / "one.weights.h5")
            with lab.raises(OSError, rf"{where}.weights.json'"):
                larger.save_weights(shards / "one.weights.json", max_shard_size=1e-3)
            with lab.raises(OSError, r"File too large, in: '.*/one.keras'"):
                larger.save(folder / "one.keras")
        assert before == {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
        larger.save_weights(shards / "one.weights.json", max_shard_size=1e-3)
        again = new(lab.strategy(), large)
        again.load_weights(shards / "one.weights.json")
        same(values(larger.weights), values(again.weights))
