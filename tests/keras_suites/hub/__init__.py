"""KerasHub's models and KerasTuner's search under a strategy."""
