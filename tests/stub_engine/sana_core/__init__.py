"""The package that worker processes of tests import in place of the real one. It needs no torch and starts at once."""
