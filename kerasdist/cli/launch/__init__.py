"""Starts and ends the workers of a job: ``kerasdist run`` and ``kerasdist.launch(fn)``."""
