"""The position of a run in its data, without a framework."""

import numpy as np

from kerasdist import keras_compat
from kerasdist.callbacks.backup.position import Position


def followed(epochs_read):
    """A position in arrays, whose adapter counts epochs as from Keras 3.16 on."""
    adapter = keras_compat.get_data_adapter(np.arange(6), batch_size=2, shuffle=True)
    adapter._epoch = epochs_read
    position = Position(np.arange(6))
    position.follow(adapter)
    return position, adapter


def test_another_run_orders_the_rows_by_the_same_number_of_epochs():
    """Keras 3.16 shuffles by that number alone: from zero, a restart would read other rows."""
    position, adapter = followed(3)
    position.epoch_begins()
    position.batches_passed(2)
    in_the_epoch = position.kept(2)
    adapter._epoch = 4
    at_its_end = position.kept(0)
    for form, within, expected in ((in_the_epoch, True, 3), (at_its_end, False, 4)):
        other, begun = followed(0)
        other.go_to(form, within=within)
        assert begun._epoch == expected


def test_a_backup_without_the_number_leaves_the_adapters_own():
    position, _ = followed(5)
    position.epoch_begins()
    form = position.kept(1)
    del form["epochs read"]
    other, begun = followed(2)
    other.go_to(form, within=True)
    assert begun._epoch == 2
