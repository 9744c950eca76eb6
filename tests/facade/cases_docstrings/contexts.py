"""Which strategy is in force, and whose code this is."""

from tests.facade.case import case
from tests.facade.lazy import kd, ops


@case
def distribute_lib__get_strategy__1(lab):
    """Outside of scopes, in a scope and in `run`: the strategy in force, and whose code it is."""
    strategy = lab.strategy()

    def where():
        here = kd.get_replica_context()
        return kd.has_strategy(), kd.in_cross_replica_context(), here is None

    seen = []

    def step():
        seen.append(where())
        here = kd.get_replica_context()
        return ops.convert_to_tensor(here.replica_id_in_sync_group), here.num_replicas_in_sync

    lab.equal((False, False, False), where())
    lab.equal(1, kd.get_strategy().num_replicas_in_sync)
    with strategy.scope():
        lab.equal((True, True, True), where())
        lab.check(kd.get_strategy() is strategy, "another strategy is said to be in force")
        ids, counts = strategy.run(step)
    lab.equal((False, False, False), where())
    lab.check(kd.get_strategy() is not strategy, "the scope has ended")
    lab.equal({(True, False, False)}, set(seen))
    lab.equal([0, 1], lab.components(ids, strategy))
    lab.equal({2}, {int(one) for one in lab.components(counts, strategy)})
