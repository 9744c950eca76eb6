"""Convolutions over channels-last images, without the two copies that Keras makes of them.

torch's convolutions take images of channels-first shape; in memory the channels may be last, which
is faster. Keras copies its images to channels-first memory and at once back to channels-last (seen
in 3.15; it does the same with gradients). Here the axes are only permuted, and nothing is copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import torch

from kerasdist import context, keras_compat

# By rank (batches of images, of volumes): the permutations to channels-first, and back.
_AXES = {4: ((0, 3, 1, 2), (0, 2, 3, 1)), 5: ((0, 4, 1, 2, 3), (0, 2, 3, 4, 1))}

_signature = cache(inspect.signature)


@cache
def install() -> None:
    """Puts the hook into Keras, once in a process."""
    keras_compat.install_in_torch_nn("conv", _convolution)


def _convolution(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if context.replica() is None:
        return original(*args, **kwargs)
    call = _signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    channels = given["data_format"] or keras.config.image_data_format()
    axes = _AXES.get(len(given["inputs"].shape)) if channels == "channels_last" else None
    if axes is None:
        return original(*args, **kwargs)
    there, back = axes
    given["inputs"] = keras_compat.ops.convert_to_tensor(given["inputs"]).permute(there)
    given["data_format"] = "channels_first"
    return original(*call.args, **call.kwargs).permute(back)
