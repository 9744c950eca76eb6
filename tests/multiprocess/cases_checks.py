"""What the workers of `kerasdist test` do."""

from tests.conformance.registry import case


# PyTorch's workers are those of `test_checks`.
@case("workers", backends=("tensorflow", "jax"))
def of_a_cluster(lab):
    """All findings are the same on every worker, and well."""
    from kerasdist.checks import cluster_test_worker as worker

    strategy = lab.strategy()
    found = [
        worker.devices(strategy, 0.0),
        *worker.collectives(strategy),
        *worker.equality(strategy),
    ]
    names = ["devices", "sum", "gather", "broadcast", "training", "workers"]
    lab.equal([one.check for one in found], names)
    lab.check({one.verdict for one in found} == {"ok"}, str(found))
    lab.alike([(one.verdict, one.found) for one in found])
