"""What a case works with: the exactness suite's lab, which does all in the scope."""

from collections.abc import Callable

from tests.conformance import lab as conformance
from tests.conformance.registry import Item


class InScopeLab(conformance.Lab):
    acts_in_scope = True


def labs(*, mirrored: bool) -> Callable[[Item], InScopeLab]:
    plain = conformance.PlainOutcomes()
    return lambda item: InScopeLab(item.case, item.backend, item.replicas, plain, mirrored)
