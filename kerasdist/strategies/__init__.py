"""The strategies: each file defines the devices of one kind, and where variables are placed."""
