"""`kerasdist plan` predicts a training step's memory and time, without the accelerators."""
