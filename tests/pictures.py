"""Training images for sana-tiny: one shape on a background of another colour, with a caption."""

import random

from PIL import Image
from shapes import combinations, draw_scene, random_caption, random_scene


def write_pictures(folder, count, seed=1, controls=False):
    """Write `count` images and captions. `controls` adds silhouettes, which show the shape's place and size."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, (combos, _) = random.Random(seed), combinations()
    for index in range(count):
        scene = random_scene(rng, combos[rng.randrange(len(combos))])
        Image.fromarray(draw_scene(scene)).save(folder / f"{seed}-{index}.png")
        if controls:
            silhouette(scene).save(folder / f"{seed}-{index}-control.png")
        (folder / f"{seed}-{index}.txt").write_text(random_caption(rng, scene))
    return str(folder)


def silhouette(scene):
    return Image.fromarray(draw_scene(scene._replace(colour="white", background="black"))).convert("L")
