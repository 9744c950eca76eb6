"""LoRA, quantized weights, and the files of KerasHub's models, with sharded state (`sharding=`)."""

import contextlib
import json
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np

from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import parts
from tests.conformance.compare import FLOAT32
from tests.conformance.lab import values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled
from tests.conformance.registry import case
from tests.multiprocess.cases_sharded_models import LAYERS, ONES, WIDTH, _alive, _by_layers
from tests.multiprocess.cases_sharded_state import BACKENDS, _own_parts, divides_weights

TOPIC = "workers"
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 12, (9, 5)).astype("int32")
Y = RANDOM.normal(size=(9, 5, 4)).astype("float32")
TRAIN = fit(IDS, Y, batch_size=4, shuffle=False)


def model():
    layers = [
        keras.layers.Embedding(12, 8),
        keras.layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de"),
        keras.layers.Reshape((5, 8)),
        keras.layers.Dense(16, "tanh"),
        keras.layers.Dense(4),
    ]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def adapted(model):
    """Trains adapters alone; of slots there are those of the adapters."""
    for layer in model.layers:
        layer.trainable = False
        if hasattr(layer, "enable_lora"):
            layer.trainable = True
            layer.enable_lora(2)
            with contextlib.suppress(AttributeError):
                layer.bias.trainable = False
    return compiled(model, keras.optimizers.SGD(0.1, momentum=0.9), "mse")


def quantized(model, bits=4):
    wanted = {
        4: lambda: keras.quantizers.Int4QuantizationConfig(block_size=4),
        8: keras.quantizers.Int8QuantizationConfig,
    }
    model.quantize(config=wanted[bits]())


def scope_of(model):
    """That of the strategy that a model was made under, if there was one."""
    from kerasdist.backends.base.model_trainer import trainer_of

    trainer = trainer_of(model)
    return contextlib.nullcontext() if trainer is None else trainer.strategy.scope()


def merged(folder):
    """Saves a model, with the adapters merged, and trains what is loaded from the file."""

    def action(model):
        model.save(folder / "m.keras")
        with scope_of(model):
            loaded = keras.models.load_model(folder / "m.keras")
        before = predict(IDS)(loaded)
        return before, TRAIN(loaded), values(loaded.weights)

    return action


@case(TOPIC, backends=BACKENDS)
def beside_quantized(lab):
    """Adapters beside int4 weights: trained, saved with them merged, loaded and trained again."""

    def build():
        made = model()
        quantized(made)
        return adapted(made)

    with lab.folder() as folder:
        ours = lab.same(build, TRAIN, merged(folder))
    slots = [one for one in ours.optimizer.variables if one.shape]
    lab.equal(len(ours.trainable_variables), len(slots))
    lab.equal(_own_parts(lab, slots), parts(slots))
    packed = [one for one in ours.weights if one.dtype == "int8"]
    lab.equal(8, len(packed))  # kernels, and zeros of their groups
    lab.equal(_own_parts(lab, packed) if divides_weights(lab) else {1.0}, parts(packed))


@case(TOPIC, backends=BACKENDS, like="sharded_adapters.beside_quantized")
def quantized_later(lab):
    """Weights that were trained are quantized, in the scope and out of it, and adapted then."""
    for in_scope in (True, False):

        def later(model, in_scope=in_scope):
            with scope_of(model) if in_scope else contextlib.nullcontext():
                quantized(model, 8)
                adapted(model)

        ours = lab.same(lambda: compiled(model(), "sgd", "mse"), TRAIN, later, TRAIN, predict(IDS))
        kernels = [one for one in ours.weights if one.dtype == "int8"]
        lab.equal(_own_parts(lab, kernels) if divides_weights(lab) else {1.0}, parts(kernels))


@case(TOPIC, backends=BACKENDS, like="sharded_adapters.beside_quantized")
def quantized_by_examples(lab):
    """Kernels of bytes, of GPTQ and AWQ, are sharded; what stands beside them is trained."""
    options = {"num_samples": 4, "sequence_length": 5, "group_size": 6}
    for name in ("GPTQConfig", "AWQConfig"):

        def build():
            layers = [keras.layers.Embedding(12, 12), keras.layers.Dense(24, "tanh")]
            inputs = keras.Input((5,), dtype="int32")
            made = keras.Sequential([inputs, *layers, keras.layers.Dense(4)])
            return compiled(made, "sgd", "mse")

        def later(model, name=name):
            first, *blocks = model.layers
            structure = {"pre_block_layers": [first], "sequential_blocks": blocks}
            config = getattr(keras.quantizers, name)
            config = config([IDS], str, quantization_layer_structure=structure, **options)
            with scope_of(model):
                model.quantize(config=config)
                compiled(model, "sgd", "mse")

        ours = lab.same(build, later, predict(IDS), TRAIN, predict(IDS))
        kernels = [one for one in ours.weights if one.dtype == "uint8"]
        lab.equal(4, len(kernels))  # with zeros of their groups
        lab.equal(_own_parts(lab, kernels) if divides_weights(lab) else {1.0}, parts(kernels))


@case(TOPIC, backends=BACKENDS, like="sharded_adapters.beside_quantized")
def beside_floats(lab):
    """Adapters beside weights of floats: trained, saved with them merged, loaded and trained."""
    with lab.folder() as folder:
        lab.same(lambda: adapted(model()), TRAIN, merged(folder))


@contextlib.contextmanager
def _gathered():
    """Notes how many bytes of each message of weights are this worker's."""
    from kerasdist.backends.torch.workers.process_group import ProcessGroup

    start, lengths = ProcessGroup.start_gather_of_parts, []

    def started(group, part):
        lengths.append(part.nbytes)
        return start(group, part)

    with mock.patch.object(ProcessGroup, "start_gather_of_parts", started):
        yield lengths


@case(TOPIC, backends=("torch",))
def quantized_by_groups(lab):
    """No more than two groups of quantized weights are whole; what was quantized travels no more.

    Keras's gradient of a quantized layer holds the weights that it has read.
    """
    from kerasdist.backends.torch.state.shards import shard_of

    strategy = _by_layers(lab)
    if strategy is None:
        return
    for bits in (8, 4):
        with strategy.scope():
            hidden = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
            deep = keras.Sequential([keras.Input((WIDTH,)), *hidden])
            deep.predict(ONES, verbose=0)
            quantized(deep, bits)
            for layer in hidden:
                layer.enable_lora(2)
            deep.compile("sgd", "mse")
        deep.fit(ONES, ONES, batch_size=8, verbose=0)
        with _alive(1 << 20) as noted:
            deep.fit(ONES, ONES, batch_size=8, verbose=0)
        pairs = [(own, one) for one in deep.weights if (own := shard_of(one)) is not None]
        sizes = [lab.shards * own.length * np.dtype(one.dtype).itemsize for own, one in pairs]
        group = sum(sizes) / LAYERS
        lab.check(max(noted) <= 2 * group, f"{max(noted) / group} layers were gathered at once")
        with _gathered() as lengths:
            deep.predict(ONES, verbose=0)
        lab.equal(sum(sizes), lab.shards * sum(lengths))


def exporting():
    """Stands for KerasHub, which CI has on few machines: how it exports, with what it calls."""
    name = "keras_hub.src.utils.transformers.export.hf_exporter"
    module = types.ModuleType(name)

    def entries(backbone, include_lm_head=False):
        up, down = backbone.get_layer("up"), backbone.get_layer("down")
        found = {"up.weight": keras.ops.transpose(up.weights[0]), "up.bias": up.bias}
        halves = [down.kernel, keras.ops.reshape(down.weights[0], (-1, 4))]
        found["down.weight"] = keras.ops.concatenate(halves, axis=-1)
        found["row"] = down.weights[0][0]
        return found

    class Backbone(keras.Model):
        def export_to_transformers(self, path):
            made = module.MODEL_EXPORTERS["Backbone"](self, include_lm_head=True)
            Path(path, "config.json").write_text(json.dumps({"width": self.get_layer("up").units}))
            Path(path, "model.safetensors").write_bytes(b"whole" * len(made))

        def save_lora_weights(self, path):
            kernels = [self.get_layer(name).lora_kernel_a for name in ("up", "down")]
            with Path(path).open("xb") as file:  # as HDF5, of two workers at once
                np.savez(file, *values(kernels))

    module.MODEL_EXPORTERS = {"Backbone": entries}
    return mock.patch.dict(sys.modules, {name: module}), Backbone


def read(path):
    """The arrays of a file of safetensors."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    lacking = header.pop("__metadata__")
    assert lacking == {"format": "pt"}
    assert all(one["dtype"] == "F32" for one in header.values())
    places = {name: [begin + at for at in one["data_offsets"]] for name, one in header.items()}
    return {
        name: np.frombuffer(data[slice(*places[name])], "float32").reshape(one["shape"])
        for name, one in header.items()
    }


@case(TOPIC, backends=BACKENDS)
def files_of_keras_hub(lab):
    """`export_to_transformers`, with adapters merged, and `save_lora_weights`, on all workers."""
    there, backbone_class = exporting()
    with there, lab.folder() as folder, lab.strategy().scope():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(12, "tanh", name="up")(inputs)
        backbone = backbone_class(inputs, keras.layers.Dense(4, name="down")(hidden))
        for name in ("up", "down"):
            backbone.get_layer(name).enable_lora(2)
        backbone.compile("sgd", "mse")
        backbone.fit(ONES, ONES[:, :4], verbose=0)
        backbone.save_lora_weights(folder / "own.lora.h5")
        backbone.export_to_transformers(folder / "own")
        lab.equal(
            {"config.json", "model.safetensors"}, {one.name for one in (folder / "own").iterdir()}
        )
        up, down = (backbone.get_layer(name) for name in ("up", "down"))
        kernels = values([up.kernel, down.kernel])
        expected = {
            "up.weight": kernels[0].T,
            "up.bias": values([up.bias])[0],
            "down.weight": np.concatenate([kernels[1]] * 2, -1),
            "row": kernels[1][0],
        }
        lab.equal(expected, read(folder / "own" / "model.safetensors"), FLOAT32)
        adapters = values([up.lora_kernel_a, down.lora_kernel_a])
        lab.equal(adapters, [*np.load(folder / "own.lora.h5").values()])
        lab.equal({"own", "own.lora.h5"}, {one.name for one in folder.iterdir()})
        other = backbone_class(inputs, keras.layers.Dense(4, name="down")(hidden))
        quantized(other, 8)
        with lab.raises(kd.errors.UnsupportedError, "are floats.*Received: .*int8.*save_lora"):
            other.export_to_transformers(folder / "other")


@case(TOPIC, backends=BACKENDS)
def read_by_transformers(lab):
    """A Gemma of KerasHub's, tuned and exported by all workers, is the same in transformers."""
    packages = str(Path(sys.prefix) / "keras-hub")
    with mock.patch.object(sys, "path", [*sys.path, packages]), lab.folder() as folder:
        import keras_hub

        sizes = {"vocabulary_size": 12, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 32}
        heads = {"num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        with lab.strategy().scope():
            backbone = keras_hub.models.GemmaBackbone(**sizes, **heads)
            model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
            backbone.enable_lora(2)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            compiled(model, keras.optimizers.Adam(0.1), loss)
        x = {"token_ids": IDS, "padding_mask": np.ones(IDS.shape, "bool")}
        before = predict(x)(model)
        model.fit(x, IDS, epochs=2, verbose=0)
        tuned = predict(x)(model)
        lab.check(np.abs(tuned - before).max() > 0.1, "the adapters were not trained")
        model.export_to_transformers(folder / "tuned")
        if not lab.job.is_chief:
            return
        import torch
        import transformers

        read = transformers.AutoModelForCausalLM.from_pretrained(folder / "tuned")
        with torch.no_grad():
            lab.equal(tuned, read(torch.tensor(IDS).long()).logits.numpy(), FLOAT32)
