"""In a trial torch draws from a generator of its own, on replicas the rows of one device."""

from tests.fresh import run_forked

PROBE = """
import keras
import torch
from kerasdist.backends.torch import private
from kerasdist.backends.torch.fit.trial import _Drawing
from kerasdist.check.comparison import RecordedDraws

def drawing(draws, seed):
    return private.intercept(_Drawing(draws, seed).run)

like, probabilities = torch.zeros(6, 3), torch.full((6, 3), 0.5)
DRAWN = {
    "rand": lambda: torch.rand(6, 3),
    "randn": lambda: torch.randn(6, 3),
    "randint": lambda: torch.randint(9, (6, 3)),
    "randint from": lambda: torch.randint(3, 1000, (6, 3)),
    "rand_like": lambda: torch.rand_like(like),
    "randn_like": lambda: torch.randn_like(like),
    "normal": lambda: torch.normal(0.0, 1.0, (6, 3)),
    "bernoulli": lambda: torch.bernoulli(probabilities),
    "multinomial": lambda: torch.multinomial(probabilities, 2),
    "poisson": lambda: torch.poisson(3 * probabilities),
    "in place": lambda: torch.empty(6, 3).uniform_(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(6, 3)),
    "gamma": lambda: torch.distributions.Gamma(1 + probabilities, 1.0).sample(),
}
before = torch.get_rng_state()
for name, draw in DRAWN.items():
    with drawing(RecordedDraws([1]), 1):
        one, after = draw(), draw()
    with drawing(RecordedDraws([1]), 1):
        again = draw()
    with drawing(RecordedDraws([1]), 2):
        other = draw()
    assert one.shape == again.shape == (6, one.shape[1]), name
    assert torch.equal(one, again), name
    assert not torch.equal(one, after) or name == "multinomial", name
    assert not torch.equal(one, other) or name == "multinomial", name
    assert torch.equal(torch.get_rng_state(), before), name
    recorded = RecordedDraws((4, 2))
    with drawing(recorded, 1):
        one = draw()
        recorded.end_recording()
        recorded.begin()
        torch.rand(5, 7)  # nothing that one device has drawn
        again = draw()
    assert torch.equal(one, again), name
    assert "rand draws shape (5, 7)" in recorded.misfit, recorded.misfit
with drawing(RecordedDraws([1]), 1):
    assert torch.randperm(4).tolist() == [0, 1, 2, 3]
print("done")
"""


def test_torch_draws_in_a_trial_from_a_generator_of_the_trial():
    assert run_forked(PROBE, "torch").splitlines()[-1] == "done"
