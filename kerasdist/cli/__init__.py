"""The command ``kerasdist``: starts, plans, checks and measures jobs."""
