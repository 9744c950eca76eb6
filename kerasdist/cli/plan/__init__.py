"""`kerasdist plan` predicts memory and time of a training step on accelerators elsewhere."""
