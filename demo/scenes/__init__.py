"""Small scenes drawn by a program, for a bundled model that draws such at 256 x 256.

`world` says what a scene may show, `captions` what is said of it, `painting` and `subjects` draw it.
"""
