"""The named data sets, one file for each package that they are read from. ``catalogue`` lists them."""
