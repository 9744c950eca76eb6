"""Writes docs/support.md from the exactness suite's result, so that the table can't lie.

    python -m tests.conformance.support

runs the suite on every backend, then writes. Results that do not cover every case are refused: a
table of half a run would look whole.
"""

from collections.abc import Iterable

from tests.conformance import registry
from tests.conformance.runner import ROOT, BackendRun, Result

PAGE = ROOT / "docs" / "support.md"
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
HEAD = """# What works, on which backend

<!-- Written by `python -m tests.conformance.support`. Do not edit. -->

Every row is a case of the exactness suite (`tests/conformance/`). A case compares a model that is
trained under `kd.MirroredStrategy` with 2, 3 or 4 CPU devices with plain Keras on one device, from
the same initial weights, with the same data in the same order and the same global batch. It
compares history, batch logs, metrics, evaluation, predictions in order, weights and the optimizer's
state.

- **yes**: equal within the tolerance; the figure is the largest absolute difference found.
- **clear error**: the backend cannot have this, and an error says so.
- **limitation**: the results need not be equal, or a part of what plain Keras does is missing. The
  reason is given under [Limitations](#limitations).
- **not in Keras**: plain Keras does not have it on this backend either, or there is nothing there
  that the case could compare.
- **no**: a defect of kerasdist.

"""


def run() -> list[Result]:
    runs = [
        BackendRun(backend, [item.key for item in registry.items(backend)])
        for backend in registry.BACKENDS
    ]
    results = []
    for running in runs:
        for result in running.results():
            print(f"{running.backend:10} {result.status:8} {result.key}", flush=True)
            results.append(result)
        running.save()
    return results


# What a table cannot say of its rows, by topic. All that is written by hand stands in this file.
NOTES = {
    "sharding": """\
On PyTorch a LayoutMap needs a process per device and a mesh of two axes, and is refused else; the
cases of `tests/multiprocess/cases_layout_maps.py` compare it with one device. Data of which each
worker reads its own part is refused with it, and so are a step that assigns to a variable in the
map, `set_most_examples_at_once`, and int4 of kernels of three axes that it divides: use int8.

These rows are of replicas in one process. **a process per device**: on PyTorch such replicas are
threads that share one optimizer, so that there is nothing to shard, and a clear error says so;
workers of one replica each have it, as `tests/multiprocess/cases_sharded_state.py` shows. See
[Models larger than a device](guides/larger-than-a-device.md).

`kd.Sharding(state, within="host")`, by which each machine holds all state, works on JAX and
PyTorch: the same cases pass on four devices of two machines (layouts `2x2-full-within-host` on JAX,
`4x1-full-within-host` and `4x1-optimizer-within-host` on PyTorch). TensorFlow refuses it, as all of
`sharding=`.
"""
}
# What threads are refused on PyTorch, and the case of tests/multiprocess in which workers have it.
ON_WORKERS = {
    "sharding.each_holds_its_slots": "sharded_state.each_holds_its_part",  # by the layout
    "sharding.each_holds_its_part": "sharded_state.each_holds_its_part",
    "sharding.small_variables_stay_whole": "sharded_state.small_variables_stay_whole",
    "sharding.drawn_as_on_one_device": "sharded_state.drawn_as_on_one_device",
    "sharding.chosen_by_rule": "sharded_state.small_variables_stay_whole",  # with "auto"
    "offload.sharded": "offload_workers.as_one_device",  # by the layout
    "sharding.layout_map": "layout_maps.as_one_device",
    "sharding.layouts_of_outputs": "layout_maps.outputs",
}


def cell(case: registry.Case, results: Iterable[Result]) -> str:
    """One case on one backend: the worst of its replica counts."""
    results = list(results)
    if not results:
        return "not in Keras"
    for result in results:
        if not result.good:
            return "**no**"
    backend = results[0].backend
    if results[0].status == "refused":
        on_workers = backend == "torch" and case.name in ON_WORKERS
        return "a process per device" if on_workers else "clear error"
    if backend in case.limitation:
        return "limitation"
    return f"yes, {max(result.difference for result in results):.0e}".replace("yes, 0e+00", "yes")


def page(results: list[Result]) -> str:
    cases = registry.load()
    by_item = {(result.backend, result.key): result for result in results}
    missing = [
        f"{backend} {item.key}"
        for backend in registry.BACKENDS
        for item in registry.items(backend)
        if (backend, item.key) not in by_item
    ]
    if missing:
        raise SystemExit(
            f"Expected a result of every case. Received: none of {len(missing)}, such as "
            f"{missing[:3]}. Run the whole suite."
        )
    topics: dict[str, list[registry.Case]] = {}
    for case in cases.values():
        topics.setdefault(case.topic, []).append(case)
    good = sum(result.good for result in results)
    lines = [HEAD, f"{good} of {len(results)} checks pass.\n"]
    reasons: dict[str, None] = {}
    for topic, members in topics.items():
        lines += ["", f"## {topic[0].upper()}{topic[1:]}", ""]
        if topic in NOTES:
            lines += [NOTES[topic]]
        lines += ["| | " + " | ".join(NAMES.values()) + " |", "|---" * (len(NAMES) + 1) + "|"]
        for case in members:
            cells = [
                cell(
                    case,
                    [
                        by_item[backend, registry.Item(case, backend, replicas).key]
                        for replicas in case.replicas
                        if backend in case.backends
                    ],
                )
                for backend in registry.BACKENDS
            ]
            lines.append(f"| {case.title.replace('|', chr(92) + '|')} | {' | '.join(cells)} |")
            for backend, reason in case.limitation.items():
                reasons[f"- {NAMES[backend]}, {case.title}: {reason}."] = None
    if reasons:
        lines += ["", "## Limitations", "", *reasons]
    tolerances = sorted({text for result in results for text in result.tolerances})
    lines += ["", "## Tolerances", "", *[f"- {text}." for text in tolerances]]
    return "\n".join(lines) + "\n"


def main() -> None:
    results = run()
    PAGE.write_text(page(results), "utf-8")
    bad = [f"{result.backend} {result.key}" for result in results if not result.good]
    print(f"Wrote {PAGE}: {len(results) - len(bad)} of {len(results)} checks pass.")
    if bad:
        raise SystemExit("Failing: " + ", ".join(bad))


if __name__ == "__main__":
    main()
