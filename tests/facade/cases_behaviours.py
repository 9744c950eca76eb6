"""The behaviours of `tf.distribute`'s public tests, a case for each theme."""

from tests.conformance import registry
from tests.facade.behaviours import MODULES, check_all


def checking(module):
    def check(lab):
        check_all(module, lab)

    return check


for module, (theme, _) in MODULES.items():
    register = registry.case("facade", replicas=(2,), name=module, title=f"{theme}, as users do")
    register(checking(module))
