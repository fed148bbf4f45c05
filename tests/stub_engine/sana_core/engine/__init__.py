"""See body.py."""
