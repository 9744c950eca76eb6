"""The backend interface, and what all backends share."""
