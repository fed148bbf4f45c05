"""The commands of `python -m sana_core`: each module has a docstring, EXAMPLE, configure(parser) and run(arguments)."""
