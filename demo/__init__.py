"""The recipe of the bundled model, which generates posters at 512 x 512.

A program paints the training images. `world` defines the possible scenes, `captions` describes them, `layout` positions
the subjects, and `painting` paints them with `land`, `subjects`, `hours` and `brush`. These commands train the model:

    python -m demo.judge
    python -m demo.autoencoder FOLDER/autoencoder --minutes 600
    python -m demo.recipe FOLDER --minutes 600

Finished stages are in FOLDER/parts, where the next run of the recipe looks for them.
"""
