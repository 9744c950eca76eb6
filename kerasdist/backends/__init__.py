"""One folder a framework, the same file names in each; `base` is all the rest may know of them."""
