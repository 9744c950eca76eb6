"""What workers compare, and how a message names the ones that differ."""

from kerasdist.job.comparison import described_difference, digest


def test_the_order_of_names_does_not_matter():
    assert digest({"a": 1, "b": [1, None]}) == digest({"b": [1, None], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})
    assert digest([1, 2]) != digest([2, 1])


def test_the_path_and_both_values_are_named():
    layers = [{"class": "Input"}, {"class": "Dense", "activation": "relu"}]
    other = [{"class": "Input"}, {"class": "Dense", "activation": "tanh"}]
    said = described_difference([{"layers": layers}, {"layers": other}])
    assert said == "layers[1].activation='tanh' on worker 1, 'relu' on worker 0"


def test_of_three_workers_the_odd_one_comes_first():
    everyone = [{"rate": 0.5}, {"rate": 0.1}, {"rate": 0.1}]
    assert described_difference(everyone) == "rate=0.5 on worker 0, 0.1 on workers 1, 2"


def test_all_groups_are_named():
    everyone = [{"n": 1}, {"n": 2}, {"n": 2}, {"n": 3}]
    assert described_difference(everyone) == "n=1 on worker 0, 3 on worker 3, 2 on workers 1, 2"


def test_what_a_worker_lacks_is_nothing():
    said = described_difference([{"n": 1}, {"n": 1, "steps": 4}])
    assert said == "steps=4 on worker 1, nothing on worker 0"


def test_further_differences_are_counted_up_by_name_alone():
    said = described_difference([{"a": 1, "b": 2, "c": 3}, {"a": 0, "b": 2, "c": 4}])
    assert said == "a=0 on worker 1, 1 on worker 0 (further differences: c)"


def test_long_values_are_cut():
    said = described_difference([{"a": "x" * 1000}, {"a": "y"}])
    assert len(said) < 400
