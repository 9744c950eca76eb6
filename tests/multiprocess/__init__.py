"""Many workers: real processes, with the numbers of one device."""
