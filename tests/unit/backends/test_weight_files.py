"""Errors of KerasHub's loader of safetensors get the names of tensor, file and variable."""

from types import SimpleNamespace

import pytest

from kerasdist.backends.base.weight_files import name_tensor

LOADER = """
class SafetensorLoader:
    preset, fname = "folder", None

    def __init__(self, index):
        self.safetensor_config = index

    def port_weight(self, keras_variable, hf_weight_key):
        raise KeyError(hf_weight_key)
"""
VARIABLE = SimpleNamespace(path="decoder/kernel", shape=(2, 3))


def notes(module, index=None):
    known = {"__name__": module}
    exec(LOADER, known)
    with pytest.raises(KeyError) as caught:
        known["SafetensorLoader"](index).port_weight(VARIABLE, "mlp.weight")
    name_tensor(caught.value)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("index", "file"),
    [
        (None, "model.safetensors"),
        (
            {"weight_map": {"model.mlp.weight": "model-00002.safetensors"}},
            "model-00002.safetensors",
        ),
        ({"weight_map": {}}, "model.safetensors.index.json"),
    ],
)
def test_the_file_of_a_tensor(index, file):
    [note] = notes("keras_hub.src.utils", index)
    said = f"the tensor 'mlp.weight' of 'folder/{file}'; it is for the variable 'decoder/kernel'"
    assert f"{said} of shape (2, 3). Choose" in note


def test_other_errors_are_left_alone():
    assert notes("someone.else") == []
