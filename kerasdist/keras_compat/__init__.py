"""The only place that touches Keras's private parts.

`patches` is where kerasdist steps into Keras; the others are the few private functions it calls.
``tests/unit/test_keras_compat.py`` fails when Keras moves what is patched; for the rest there are
cases in the suites, which run over the oldest Keras, too.
"""

from __future__ import annotations

# Each name that these files define is a name of this package.
from kerasdist.keras_compat.data import *
from kerasdist.keras_compat.models import *
from kerasdist.keras_compat.optimizers import *
from kerasdist.keras_compat.patches import *
from kerasdist.keras_compat.pipelines import *
from kerasdist.keras_compat.snapshots import *
from kerasdist.keras_compat.steps import *
from kerasdist.keras_compat.thread_state import *
from kerasdist.keras_compat.variables import *
