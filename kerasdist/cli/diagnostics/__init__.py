"""Checks of a machine or cluster: ``kerasdist test``, ``doctor`` and ``bench``."""
