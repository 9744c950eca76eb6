"""Starts the workers of a job, and ends them: ``kerasdist run``, and ``kerasdist.launch(fn)``."""
