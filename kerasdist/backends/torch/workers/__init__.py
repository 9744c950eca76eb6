"""Workers of a job: process groups, and gradients that travel in buckets."""
