"""The only package that uses private functions and attributes of Keras.

`patches` has the places at which kerasdist changes Keras; the other files call a few private
functions. ``tests/unit/test_keras_compat.py`` fails if Keras moves something that is patched. Other
tests run the code that calls private functions, also with the oldest supported Keras.
"""

from __future__ import annotations

# All names that these files define can be imported from this package.
from kerasdist.keras_compat.data import *
from kerasdist.keras_compat.models import *
from kerasdist.keras_compat.optimizers import *
from kerasdist.keras_compat.patches import *
from kerasdist.keras_compat.pipelines import *
from kerasdist.keras_compat.snapshots import *
from kerasdist.keras_compat.steps import *
from kerasdist.keras_compat.thread_state import *
from kerasdist.keras_compat.variables import *
