"""The examples of tf.distribute's docstrings: a case each, named after where the example stands."""

from tests.facade.cases_docstrings import contexts, datasets, extended, replicas, strategies, tpu

__all__ = ["contexts", "datasets", "extended", "replicas", "strategies", "tpu"]
