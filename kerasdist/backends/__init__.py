"""One folder per framework, with the same file names in each, behind the interfaces in `base`."""
