"""Posters drawn by a program, for a bundled model that draws such at 512 x 512.

`world` says what a scene may show, `captions` what is said of it, `layout` where things stand, `painting` with `land`,
`subjects`, `hours` and `brush` draws it. The model is made by three commands, each of which says more of itself:

    python -m demo.posters.judge
    python -m demo.posters.autoencoder FOLDER/autoencoder --minutes 600
    python -m demo.posters.recipe FOLDER --minutes 600

What is done of it lies in `parts`, where the next run of the recipe finds it.
"""
