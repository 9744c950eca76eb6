"""Stands before the installed package of this name; see ABSENT in tests/environment.py."""

raise ModuleNotFoundError("matplotlib is kept from this process", name="matplotlib")
