"""Posters drawn by a program, for a bundled model that draws such at 512 x 512.

`world` says what a scene may show, `captions` what is said of it, `layout` where things stand, `painting` with `land`,
`subjects` and `brush` draws it.
"""
