"""What a resolver offers, in the manner of tf.distribute's."""

import pytest

import kerasdist as kd
from kerasdist.cluster import ClusterSpec, Membership, SimpleClusterResolver
from kerasdist.errors import ClusterError, UnsupportedError
from tests.unit.cluster import environments as env

CHIEF = {"chief": ["c:1000"], "worker": ["a:1000", "b:1000"]}
WORKERS = {"worker": ["a:1000", "b:1000"]}


class TestSimple:
    def test_a_chief_comes_first(self):
        resolver = SimpleClusterResolver(CHIEF, "worker", 1, environ={})
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert (resolver.rank, resolver.num_workers) == (2, 3)
        assert not resolver.membership().is_chief
        assert resolver.membership().coordinator == "c:2000"
        assert resolver.cluster_spec() == ClusterSpec(CHIEF)

    @pytest.mark.parametrize(
        ("cluster", "task", "index", "is_chief"),
        [(CHIEF, "chief", 0, True), (WORKERS, "worker", 0, True), (WORKERS, "worker", 1, False)],
    )
    def test_without_a_chief_worker_0_is(self, cluster, task, index, is_chief):
        resolver = SimpleClusterResolver(cluster, task, index, environ={})
        assert resolver.membership().is_chief is is_chief
        assert resolver.cluster_spec() == ClusterSpec(cluster)

    def test_master(self):
        resolver = SimpleClusterResolver(CHIEF, "worker", 1, environ={})
        assert resolver.master() == "grpc://b:1000"
        assert resolver.master("chief", 0) == "grpc://c:1000"
        assert resolver.master("chief", 0, "") == "c:1000"
        assert resolver.rpc_layer == "grpc"
        assert resolver.environment == ""
        assert SimpleClusterResolver({"worker": ["a:1"]}, environ={}).master() == ""

    def test_the_coordinator_may_be_given(self):
        resolver = SimpleClusterResolver(WORKERS, coordinator="z:9", environ={})
        assert resolver.membership().coordinator == "z:9"

    def test_the_coordinator_is_at_no_workers_port(self):
        """TensorFlow listens at every one of them, and all may be on one machine."""
        addresses = [f"localhost:{port}" for port in (10_000, 11_000, 12_000)]
        resolver = SimpleClusterResolver({"worker": addresses}, environ={})
        assert resolver.membership().coordinator == "localhost:13000"

    def test_a_task_that_is_not_there(self):
        with pytest.raises(ClusterError, match="task_id=2"):
            SimpleClusterResolver(WORKERS, "worker", 2, environ={})
        with pytest.raises(UnsupportedError, match="validation_data"):
            SimpleClusterResolver(WORKERS, "evaluator", 0, environ={})

    def test_devices_of_another_task(self):
        with pytest.raises(ValueError, match="own task, worker 0"):
            SimpleClusterResolver(WORKERS, environ={}).num_accelerators("worker", 1)


class TestSpec:
    def test_as_tensorflow_has_it(self):
        spec = ClusterSpec(CHIEF)
        assert spec.jobs == ["chief", "worker"]
        assert spec.num_tasks("worker") == 2
        assert spec.task_indices("worker") == [0, 1]
        assert spec.job_tasks("worker") == ["a:1000", "b:1000"]
        assert spec.task_address("worker", 1) == "b:1000"
        assert spec.as_dict() == CHIEF
        assert ClusterSpec(spec) == spec
        assert spec
        assert not ClusterSpec({})

    def test_addresses_by_number(self):
        assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}).job_tasks("worker") == ["a:1", "b:1"]
        with pytest.raises(ClusterError, match="without a gap"):
            ClusterSpec({"worker": {0: "a:1", 2: "b:1"}})

    @pytest.mark.parametrize("wrong", [["a:1"], "a:1", {"worker": "a:1"}, {"worker": 3}, None])
    def test_what_it_is_not(self, wrong):
        with pytest.raises(TypeError, match="Received: "):
            ClusterSpec(wrong)

    def test_unknown_job_task_and_address(self):
        spec = ClusterSpec({"worker": [None, None]})
        with pytest.raises(ValueError, match="job_name='ps'"):
            spec.num_tasks("ps")
        with pytest.raises(ValueError, match="task_index=2"):
            spec.task_address("worker", 2)
        with pytest.raises(ClusterError, match="exchange their addresses"):
            spec.task_address("worker", 1)


def test_addresses_that_nobody_tells_are_none():
    resolver = kd.cluster.TorchrunClusterResolver(env.TORCHRUN)
    assert resolver.cluster_spec().as_dict() == {"worker": [None] * 8}
    assert repr(resolver) == "TorchrunClusterResolver(rank=5, num_workers=8)"


def test_a_membership_needs_an_address_for_each():
    with pytest.raises(ClusterError, match="address for each of 2"):
        Membership("worker", 0, 0, 2, ("a:1",), None, "test")


def test_the_public_names_resolve_and_an_unknown_one_does_not():
    assert all(getattr(kd.cluster, name).__doc__ for name in kd.cluster.__all__)
    assert set(kd.cluster.__all__) <= set(dir(kd.cluster))
    with pytest.raises(AttributeError, match="Resolvr"):
        kd.cluster.Resolvr  # noqa: B018
