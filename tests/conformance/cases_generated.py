"""Generated cases: sizes, replicas, reductions, weights, masks; the same each time."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.lazy import keras
from tests.conformance.models import STEPS_IN_TIME, dense, regression, tagger, tokens
from tests.conformance.registry import REPLICAS, case
from tests.environment import everything

EXAMPLES = {"tensorflow": 12, "jax": 12, "torch": 40}
if not everything():
    EXAMPLES |= {"tensorflow": 4, "jax": 4}


@case("generated")
def sizes_reductions_weights_masks(lab):
    """Batch size, number of examples, replicas, reduction, weights, masks: at random."""
    import hypothesis
    from hypothesis import strategies as st

    reductions = st.sampled_from(["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"])

    @hypothesis.settings(
        max_examples=EXAMPLES[lab.backend],
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        n=st.integers(1, 13),
        batch=st.integers(1, 9),
        replicas=st.sampled_from(REPLICAS),
        reduction=reductions,
        weights=st.sampled_from(["none", "some zero", "first zero"]),
        masked=st.booleans(),
        accumulate=st.sampled_from([None, 2]),
        seed=st.integers(0, 99),
    )
    def check(n, batch, replicas, reduction, weights, masked, accumulate, seed):
        if masked:
            x = tokens(n, seed)
            y = np.random.default_rng(seed).normal(size=(n, STEPS_IN_TIME, 1)).astype("float32")
        else:
            x, y = regression(n, seed=seed)
        given = None
        if weights != "none":
            given = np.random.default_rng(seed).uniform(0.1, 2.0, n).astype("float32")
            given[: n // 2 if weights == "first zero" else n : 2] = 0.0
            if masked:
                given = given[:, None] * np.ones((n, STEPS_IN_TIME), "float32")

        def build():
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model = tagger() if masked else dense()
            model.compile(
                keras.optimizers.SGD(0.01, 0.9, gradient_accumulation_steps=accumulate),
                loss,
                metrics=["mae"],
                weighted_metrics=["mse"],
            )
            return model

        options = {"y": y, "sample_weight": given, "batch_size": batch}
        inner = lab.with_replicas(replicas)
        inner.same(
            build,
            fit(x, epochs=2, shuffle=False, **options),
            evaluate(x, **options),
            predict(x, batch_size=batch),
            share_plain=False,
        )
        lab.difference = max(lab.difference, inner.difference)
        lab.tolerances.update(inner.tolerances)

    check()
