"""One file per strategy: its devices, and the placement of its variables."""
