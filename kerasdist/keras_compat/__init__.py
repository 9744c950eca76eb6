"""The only place that touches Keras's private parts.

`patches` is where kerasdist steps into Keras; the others are the few private functions it calls.
``tests/unit/test_keras_compat.py`` fails when Keras moves what is patched; for the rest there are
cases in the suites, which run over the oldest Keras, too.
"""

from __future__ import annotations

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.losses.loss import apply_mask, reduce_values
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

# Each name that these files define is a name of this package.
from kerasdist.keras_compat.data import *
from kerasdist.keras_compat.models import *
from kerasdist.keras_compat.optimizers import *
from kerasdist.keras_compat.patches import *
from kerasdist.keras_compat.pipelines import *
from kerasdist.keras_compat.snapshots import *
from kerasdist.keras_compat.steps import *
from kerasdist.keras_compat.variables import *
