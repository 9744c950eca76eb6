"""Convolutions over images with the channels last, without two copies of what goes in.

torch's convolutions want the channels first, in the shape; in memory they may be last, which is the
faster way. Keras copies its images into the one order of memory, and at once back into the other
(seen in 3.15; the gradients go the same way). Here the axes are named anew, and nothing moves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import torch

from kerasdist import context, keras_seam

# From where to where the axes of a batch of images, or of volumes, go and come back.
_AXES = {4: ((0, 3, 1, 2), (0, 2, 3, 1)), 5: ((0, 4, 1, 2, 3), (0, 2, 3, 4, 1))}

_signature = cache(inspect.signature)


@cache
def install() -> None:
    """Puts the hook into Keras, once in a process."""
    keras_seam.install_in_torch_nn("conv", _convolution)


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
    given["inputs"] = keras_seam.ops.convert_to_tensor(given["inputs"]).permute(there)
    given["data_format"] = "channels_first"
    return original(*call.args, **call.kwargs).permute(back)
