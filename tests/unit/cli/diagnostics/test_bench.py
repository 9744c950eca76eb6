"""``kerasdist bench``: numbers of workers, efficiency, and what is shown."""

import json

import pytest

from kerasdist.cli.diagnostics import bench
from kerasdist.cli.diagnostics.bench import Row, Scaling
from tests.unit.printed import printed


def measured(replicas, seconds, batch=32, device="gpu:0"):
    all_reduce = {"bytes": 8e9, "seconds": 0.1, "replicas": replicas} if replicas > 1 else None
    return {
        "backend": "jax",
        "workers": replicas,
        "replicas": replicas,
        "device": device,
        "batch": batch,
        "steps": 10,
        "seconds": seconds,
        "with_compilation": False,
        "parameters": 2_000_000_000,
        "all_reduce": all_reduce,
    }


def shown(scaling):
    return printed(bench.show, scaling, width=80)


ROWS = [Row(1, measured(1, 1.0)), Row(2, measured(2, 1.25, batch=64))]
SCALING = Scaling("train.py", "jax", ROWS, bench.Reference(160e9, "NVLink of a GPU"))


def test_efficiency_and_bandwidth():
    assert [row.rate for row in ROWS] == pytest.approx([320.0, 512.0])
    assert SCALING.efficiency(ROWS[0]) == 1.0
    assert SCALING.efficiency(ROWS[1]) == pytest.approx(0.8)
    assert ROWS[0].bus_bandwidth is None
    assert ROWS[1].bus_bandwidth == pytest.approx(80e9)  # 2 * (2 - 1) / 2 of 8 GB in 0.1 s
    assert SCALING.of_links(ROWS[1]) == pytest.approx(0.5)
    # Against what each replica of the first row does.
    rows = [Row(2, measured(2, 1.0)), Row(4, measured(4, 1.0))]
    assert Scaling("x", "jax", rows, None).efficiency(rows[1]) == pytest.approx(0.5)


def test_the_table_fits_a_terminal():
    text = shown(SCALING)
    for words in ("examples/s", "efficiency", "80%", "80 GB/s", "50%", "NVLink of a GPU"):
        assert words in text
    assert "…" not in text
    assert "strong scaling" not in text


def test_the_notes():
    same = [Row(1, measured(1, 1.0, device="cpu:0")), Row(2, measured(2, 1.0))]
    text = shown(Scaling("x", "jax", same, None))
    assert "no reference" in text
    assert "strong scaling" in " ".join(text.split())
    assert "same number of cores" in text
    assert "steps/s" in shown(Scaling("x", "jax", [Row(1, measured(1, 1.0, batch=None))], None))


def test_a_job_that_failed_is_shown_and_the_others_too():
    scaling = Scaling("x", "jax", [ROWS[0], Row(2, {}, "worker 1/2: exit code 3")], None)
    assert "2 workers failed: worker 1/2: exit code 3" in shown(scaling)
    told = json.loads(bench.described(scaling))
    assert told["reference"] is None
    assert told["rows"][0]["efficiency"] == 1.0
    assert told["rows"][1] == {"workers": 2, "failure": "worker 1/2: exit code 3"}


def test_the_plot(tmp_path):
    bench.draw(SCALING, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_the_numbers_of_workers(most, counts):
    assert bench._doubled(most) == counts
