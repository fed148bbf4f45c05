"""What all of `sana_core` stands on: devices, cancellation, files that are written whole, the lock of a folder."""
