"""Basics for all of `sana_core`: devices, cancellation, atomic files, the lock of a folder, checks of values."""
