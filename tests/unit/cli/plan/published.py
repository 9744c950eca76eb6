"""Scaling that others have measured, and what the formulas of `kerasdist plan` say of it.

    python -m tests.unit.cli.plan.published

writes the table into docs/guides/plan.md. Efficiency is the throughput of a device as a part of
that of a device of the smallest group. Each device has the same batch in groups of all sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kerasdist.cli.plan.hlo import Collective
from kerasdist.cli.plan.planning import Work, collective_time, step_time
from kerasdist.core.hardware import Target, parse_target
from tests.fresh import ROOT

PAGE = ROOT / "docs" / "guides" / "plan.md"
BEGIN, END = "<!-- published: begin -->\n", "<!-- published: end -->\n"
CLOSE = 0.05

NOTHING = Work({}, 0.0)


@dataclass(frozen=True)
class Point:
    """A measurement that others have published."""

    what: str  # the model, its batch and the program
    step: float  # of the smallest group, in seconds
    base: str  # the smallest group
    reached: Mapping[str, float]  # the efficiency of larger groups
    sends: Sequence[Collective]
    source: str
    network: float = 1.0  # by the rate in the table of chips
    # Sums of the smallest group for one of a larger, where all have one global batch.
    sums_of_base: float = 1.0

    def without_overlap(self, name: str) -> float:
        """The efficiency of a group if collectives overlap with nothing."""
        few, many = (self._network_time(one) for one in (self.base, name))
        return self.step / (self.step - self.sums_of_base * few + many)

    def with_overlap(self, name: str) -> float:
        """The same if all of them overlap with the device's own work."""
        target = self._target(name)
        hidden = [Collective(each.kind, each.bytes, 0, 1.0) for each in self.sends]
        return step_time(NOTHING, hidden, target, self.step).efficiency

    def error(self, name: str) -> float:
        """How far the measurement is outside of the two; below 0: it is less."""
        low, high = self.without_overlap(name), self.with_overlap(name)
        return min(0.0, self.reached[name] - low) or max(0.0, self.reached[name] - high)

    def _target(self, name: str) -> Target:
        return target_of(name).with_network(self.network)

    def _network_time(self, name: str) -> float:
        return sum(collective_time(each, self._target(name)) for each in self.sends)


def target_of(name: str) -> Target:
    """Returns a target by a name such as 8xa100, or 32 slices v5e:1x1."""
    slices, _, one = name.rpartition(" slices ")
    return replace(parse_target(one), slices=int(slices or 1))


def sums(parameters: float, size: int = 4) -> list[Collective]:
    """Gradients are summed."""
    return [Collective("all-reduce", int(size * parameters), 0, 0.0)]


def sharded(parameters: float, size: int) -> list[Collective]:
    """Weights in bfloat16 are gathered, forward and backward; gradients are scattered."""
    gather = Collective("all-gather", int(2 * parameters), 0, 0.0)
    return [gather, gather, Collective("reduce-scatter", int(size * parameters), 0, 0.0)]


_NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/blob/master"
_DLPERF = "https://github.com/Oneflow-Inc/DLPerf/blob/master/reports"
_OF_2021 = f"[DLPerf]({_DLPERF}/dlperf_benchmark_test_report_v1.md)"
_OF_GPT = f"[DLPerf]({_DLPERF}/GPT/dlperf_gpt_test_report_210512.md)"
_MOSAIC = (
    "[llm-foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/"
    "README.md)"
)
_TORCHTITAN = (
    "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md)"
)
_MAXTEXT = (
    "[MaxText](https://github.com/AI-Hypercomputer/maxtext/blob/"
    "0ed7bd529b9d690570473c3525d1efeda6b6c944/MaxText/configs/v5e/README.md)"
)
_RESNET, _EFFICIENTNET, _VGG = 25.6e6, 21.5e6, 138e6
_BERT, _BERT_LARGE, _GPT = 110e6, 336e6, 0.53e9
_NODES = ("8xv100", "2x8xv100", "4x8xv100")


def _on_v100(
    what: str, rate: float, batch: int, parameters: float, reached: Sequence[float], source: str
) -> Point:
    """A point of DLPerf, whose machines of 8 GPUs have one card of 100 Gbit/s."""
    found = dict(zip(_NODES, reached, strict=True))
    return Point(what, batch / rate, "v100", found, sums(parameters), source, network=0.25)


def _on_a100(what: str, alone: float, eight: float, folder: str) -> Point:
    """ResNet-50 v1.5 of NVIDIA, images a second; 256 at a time."""
    source = f"[DeepLearningExamples]({_NVIDIA}/{folder}/README.md)"
    reached = {"8xa100": eight / (8 * alone)}
    return Point(f"ResNet-50, {what}", 256 / alone, "a100", reached, sums(_RESNET), source)


def _mpt(what: str, parameters: float, sequences: int, rates: Mapping[str, float]) -> Point:
    """Of 2,048 tokens; tokens a second of a GPU; weights and gradients in bfloat16."""
    base, *others = rates
    reached = {name: rates[name] / rates[base] for name in others}
    step = sequences * 2048 / rates[base]
    return Point(what, step, base, reached, sharded(parameters, 2), _MOSAIC)


def _bert_large(
    batch: int, rate: float, base: str, taken: int, larger: str, reached: float
) -> Point:
    """Of NVIDIA, in mixed precision: `taken` batches of a device between two sums."""
    source = f"[DeepLearningExamples]({_NVIDIA}/TensorFlow2/LanguageModeling/BERT/README.md)"
    what = f"BERT-Large, {batch} x {taken}, TF 2 and Horovod"
    step, part = batch * taken / rate, taken / {"2x8xv100": 64, "8xa100": 32}[base]
    sends = sums(_BERT_LARGE)
    return Point(what, step, base, {larger: reached}, sends, source, sums_of_base=part)


def _maxtext(what: str, parameters: float, sequences: int, used: Mapping[int, float]) -> Point:
    """Of 2,048 tokens; the used part of a chip's 197 TFLOP/s, by the number of slices.

    A chip sums its part of the gradients with others; what happens in a slice is in the step.
    """
    reached = {f"{one} slices v5e:1x1": used[one] / used[1] for one in used if one > 1}
    step = sequences * 2048 * 6 * parameters / (used[1] * 197e12)
    return Point(what, step, "v5e:1x1", reached, sums(parameters / 256), _MAXTEXT)


POINTS = (
    _on_v100(
        "ResNet-50, 128, `tf.distribute`", 321.8, 128, _RESNET, (0.955, 0.942, 0.915), _OF_2021
    ),
    _on_v100("ResNet-50, 128, OneFlow", 384.9, 128, _RESNET, (0.964, 0.959, 0.951), _OF_2021),
    _on_v100("BERT-base, 32, OneFlow", 145.2, 32, _BERT, (0.898, 0.814, 0.800), _OF_2021),
    _on_v100("BERT-base, 64, OneFlow", 149.8, 64, _BERT, (0.950, 0.913, 0.899), _OF_2021),
    _on_v100("BERT-base, 96, OneFlow", 149.8, 96, _BERT, (0.966, 0.942, 0.929), _OF_2021),
    _on_v100("BERT-base, 32, TF 1 and Horovod", 106.8, 32, _BERT, (0.944, 0.638, 0.563), _OF_2021),
    _on_v100("BERT-base, 32, MXNet and Horovod", 127.1, 32, _BERT, (0.913, 0.559, 0.466), _OF_2021),
    _on_v100("GPT of 0.53 billion, 2, Megatron-LM", 4.31, 2, _GPT, (0.965, 0.698, 0.679), _OF_GPT),
    _on_v100("GPT of 0.53 billion, 2, OneFlow", 4.92, 2, _GPT, (0.973, 0.830, 0.784), _OF_GPT),
    Point(
        "VGG-16, 64, TF 1 and Horovod, 25 Gbit/s for each 4",
        64 / 154,
        "p100",
        {"128x4xp100": 0.68},
        sums(_VGG),
        "[Horovod](https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst); one does "
        "154 images/s: [TensorFlow](https://www.tensorflow.org/performance/benchmarks)",
        network=25 / 4 / 50,
    ),
    Point(
        "ResNet-50, 32, Caffe2, 50 Gbit/s for each 8",
        0.232,
        "8xp100",
        {"32x8xp100": 0.90},
        sums(_RESNET),
        "[Goyal et al.](https://arxiv.org/abs/1706.02677)",
        network=0.125,
    ),
    _on_a100("float32, PyTorch", 938, 7248, "PyTorch/Classification/ConvNets/resnet50v1.5"),
    _on_a100("mixed, PyTorch", 2470, 16621, "PyTorch/Classification/ConvNets/resnet50v1.5"),
    _on_a100("TF32, MXNet", 1022, 8001, "MxNet/Classification/RN50v1.5"),
    _on_a100("mixed, MXNet", 2180, 16925, "MxNet/Classification/RN50v1.5"),
    _on_a100("mixed, TF 1", 2375, 17400, "TensorFlow/Classification/ConvNets/resnet50v1.5"),
    _bert_large(60, 220.5, "2x8xv100", 16, "8x8xv100", 13370 / (4 * 3529)),
    _bert_large(60, 220.5, "2x8xv100", 4, "32x8xv100", 42697 / (16 * 3529)),
    _bert_large(60, 220.5, "2x8xv100", 2, "64x8xv100", 84223 / (32 * 3529)),
    _bert_large(312, 475.5, "8xa100", 16, "2x8xa100", 7551 / (2 * 3804)),
    _bert_large(312, 475.5, "8xa100", 4, "8x8xa100", 29711 / (8 * 3804)),
    _bert_large(312, 475.5, "8xa100", 1, "32x8xa100", 110281 / (32 * 3804)),
    Point(
        "EfficientNetV2-S, 460 of 300 x 300, mixed, TF 2 and Horovod",
        460 / 950,
        "a100",
        {
            "8xa100": 6600 / (8 * 950),
            "2x8xa100": 14517 / (16 * 950),
            "10x8xa100": 62130 / (80 * 950),
        },
        sums(_EFFICIENTNET),
        f"[DeepLearningExamples]({_NVIDIA}/TensorFlow2/Classification/ConvNets/efficientnet_v2/"
        "README.md)",
    ),
    _maxtext(
        "16 billion, 6 x 2,048 tokens, slices of 256, MaxText",
        16e9,
        6,
        {1: 0.6110, 4: 0.5914, 16: 0.5656, 32: 0.5465},
    ),
    _maxtext(
        "128 billion, 2,048 tokens, slices of 256, MaxText",
        128e9,
        1,
        {1: 0.5606, 4: 0.5493, 16: 0.5086, 32: 0.4625},
    ),
    Point(
        "Llama 3.1 8B, 2 x 8,192 tokens, FSDP2",
        2 * 8192 / 5762,
        "8xh100",
        {"16x8xh100": 5605 / 5762},
        sharded(8.03e9, 4),
        _TORCHTITAN,
    ),
    _mpt(
        "MPT 7B, 18 x 2,048 tokens, FSDP",
        6.66e9,
        18,
        {"4x8xa100": 3725, "8x8xa100": 3665, "16x8xa100": 3623},
    ),
    _mpt(
        "MPT 3B, 6 x 2,048 tokens, FSDP",
        2.65e9,
        6,
        {"4x8xa100": 9914, "8x8xa100": 9736, "16x8xa100": 9538},
    ),
)
"""Where nothing else is said: float32 gradients, and GPUs and network as in the table of chips."""


def table() -> str:
    """The table, and the sentence on its error, as docs/guides/plan.md has them."""
    lines = [
        "| model, examples of a device, program | devices | planned, if nothing overlaps | "
        "if all overlaps | measured | source |",
        "|---|---|---|---|---|---|",
    ]
    for point in POINTS:
        names = list(point.reached)
        base, counts = target_of(point.base), ", ".join(f"{target_of(n).devices}" for n in names)
        columns = (
            point.what,
            f"{base.devices} to {counts} {base.chip.name.upper()}",
            _percent([point.without_overlap(name) for name in names]),
            _percent([point.with_overlap(name) for name in names]),
            _percent([point.reached[name] for name in names]),
            point.source,
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + f"\n\n{error()}\n"


def _percent(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values) + " %"


def error() -> str:
    """One sentence on how far the plans are off."""
    errors = [(point.error(name), point) for point in POINTS for name in point.reached]
    close = [one for one, _ in errors if abs(one) <= CLOSE]
    within = [one for one in close if one == 0]
    assert max(one for one, _ in errors) == 0  # else the sentence has to say so
    least = min(errors, key=lambda one: one[0])
    return (
        f"**The error.** Of {len(errors)} measurements, {len(within)} lie between the two planned "
        f"columns, {len(close) - len(within)} lie at most {100 * CLOSE:.0f} points below both "
        f"columns, and {len(errors) - len(close)} lie further below; the largest distance from "
        f"the nearer column is {-100 * least[0]:.0f} points, in the row {least[1].what!r}. None "
        "lies above both columns."
    )


def in_page(text: str) -> str:
    """What stands between the marks of a page."""
    return text.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(BEGIN + in_page(page) + END, BEGIN + table() + END), "utf-8")
