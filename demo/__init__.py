"""The recipe of the bundled checkpoint: what it draws, how it is judged, how it is trained."""
