"""Runs a function as the workers of a kerasdist job, on a Ray cluster."""

from __future__ import annotations

from kerasdist_ray.errors import RayJobError
from kerasdist_ray.job import run_on_ray

__all__ = ["RayJobError", "run_on_ray"]
