"""One folder per framework, with mostly the same file names, behind the interfaces in `base`."""
