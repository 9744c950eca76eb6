"""`kerasdist plan`: what a training step would need and take on accelerators that are not here."""
