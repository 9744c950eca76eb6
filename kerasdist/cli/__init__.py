"""The command ``kerasdist``, which starts, plans, checks and measures jobs."""
