"""One file a strategy: which devices, which placement."""
