"""The strategies, and the code that chooses their devices and checks their arguments."""
