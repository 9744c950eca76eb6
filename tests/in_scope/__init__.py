"""The suites' cases with all of a program in `with strategy.scope():`, as many people write it."""
