"""What workers compare, and how a message names the ones that differ."""

from kerasdist.job.comparison import described_difference, digest, named_places


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


def test_of_many_workers_eight_and_the_number_of_the_others_are_named():
    said = described_difference([{"n": int(rank == 9)} for rank in range(4096)])
    assert said == "n=1 on worker 9, 0 on workers 0, 1, 2, 3, 4, 5, 6, 7 and 4087 others"
    said = described_difference([{"n": rank} for rank in range(4096)])
    assert said.startswith("n=1 on worker 1, 2 on worker 2, ")
    assert said.endswith("8 on worker 8, 0 on worker 0, other values on 4087 more")


def test_one_worker_can_speak_for_those_that_agree_with_it():
    groups = [[0, 3], [1, 2, 4], [5]]
    said = described_difference([{"n": 1}, {"n": 2}], groups)
    assert said == "n=1 on workers 0, 3, 2 on workers 1, 2, 4, other values on 1 more"


def test_places_of_many_workers():
    assert named_places({1: "at 'b'", 0: "at 'a'", 2: "at 'a'"}) == (
        "workers 0, 2 are at 'a'; worker 1 is at 'b'"
    )
    said = named_places({rank: f"at step {rank}" for rank in range(4096)})
    assert said.endswith("worker 7 is at step 7; 4088 others are elsewhere")
