"""Best of N: generate several images of each prompt, score every finished image with a CLIP, and keep the best.

transformers' `from_pretrained` is not used: the folder's JSON files could make it download kernels, follow an adapter
or an index to another folder, and build any number of layers. Here only known fields reach transformers' classes, and
the weights come only from files in this folder.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.files import LARGEST_TEXT, REDOWNLOAD, read_bytes, read_json, readable
from ..checkpoints.fingerprint import digest_files, digest_json
from ..checkpoints.headers import Weights, read_header, read_sharded, read_tensors
from ..checkpoints.load import check_names, check_shapes, fill_module
from ..checkpoints.schemas import FACTOR, SHARE, Check, flag, number, optional, refuse_code, same, several, whole, word
from ..checkpoints.tokenizer import json_tokenizer
from ..errors import CheckpointError, InputError, MissingFileError
from ..runtime.checks import RENAME, check_text, check_whole
from ..runtime.image_files import levels
from ..runtime.text import Json, brief, get_logger, shown
from .pipeline import Request
from .plan import LARGEST_COUNT, FailedImage, Generated, ImageSpec, Workload, failed_images

logger = get_logger(__name__)

# Generates the images of a request, on the devices of this machine or on a cluster.
Backend = Callable[[Request], Generator[Generated, None, None]]
SUITABLE = "use a CLIP of text and images, such as openai/clip-vit-large-patch14 or yuvalkirstain/PickScore_v1"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# CLIPs for 224 to 448 pixels are published.
LARGEST_IMAGE = 1024
# The numbers of a text or image encoder. The shapes of the weights limit them further.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "patch_size"),
)
ENCODER: dict[str, Check] = {
    **dict.fromkeys(SIZES, optional(whole(0, 10_000_000))),
    "num_channels": same(3),
    "image_size": whole(1, LARGEST_IMAGE),
    "hidden_act": word,
    "layer_norm_eps": SHARE,
}
CONFIG = {"model_type": same("clip"), "quantization_config": same(None), "projection_dim": whole(1, 10_000_000)}


def is_size(value: object) -> bool:
    """Whether `value` is an image size for CLIPImageProcessor: a number of pixels, or an object of such numbers."""
    if not isinstance(value, dict):
        return whole(1, LARGEST_IMAGE)(value)
    return value.keys() in ({"shortest_edge"}, {"height", "width"}) and all(map(is_size, value.values()))


PROCESSOR: dict[str, Check] = {
    **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), flag),
    **dict.fromkeys(("size", "crop_size"), optional(is_size)),
    # Pillow's numbers for nearest, Lanczos, bilinear and bicubic
    "resample": whole(0, 3),
    "rescale_factor": FACTOR,
    "image_mean": optional(several(3, number(-1000, 1000))),
    "image_std": optional(several(3, number(0.001, 1000))),
}


class Scorer(NamedTuple):
    """`score(images, prompt)` returns how well each of the images [B, 3, H, W] in [-1, 1] fits, float32 [B] on the CPU.

    Higher is better; scores compare images of one prompt. `model` is the module, for callers that move it.
    """

    name: str
    model: torch.nn.Module
    score: Callable[[torch.Tensor, str], torch.Tensor]


def load_scorer(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Scorer:
    """Return the CLIP in `folder`: config.json, model.safetensors, tokenizer.json and preprocessor_config.json.

    Its scores are the cosine of image and prompt times the model's scale, as published for CLIP and PickScore_v1.
    Raises MissingFileError or ReadError for a folder that is not whole, CheckpointError for another model and a broken
    file.
    """
    from PIL import Image
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = Path(folder)
    weights, file = read_weights(folder), folder / "config.json"
    content = read_json(file)
    arguments = known_fields(shown(file), content, CONFIG)
    for tower in ("text", "vision"):
        section = f"{tower}_config"
        # Early CLIPs have a section twice. transformers follows the one with "_dict" where it is not null.
        fields: Any = next((content[key] for key in (f"{section}_dict", section) if content.get(key) is not None), {})
        arguments[section] = known_fields(f"{shown(file)}: {section}", fields, ENCODER)
        # Building layers takes time and memory, so the weights must have the last layer of config.json.
        last = f"{tower}_model.encoder.layers.{arguments[section].get('num_hidden_layers', 1) - 1}.layer_norm1.weight"
        check_names(folder.name, "no", {last} - weights.headers.keys())
    # accelerate's init_empty_weights allocates every tensor once, at the sizes in config.json.
    with naming(file), torch.device("meta"):
        config: CLIPConfig = CLIPConfig(**arguments)
        model: Any = CLIPModel(config)
    expected = dict(model.named_parameters())
    shapes = {name: header.shape for name, header in weights.headers.items() if header.dtype.is_floating_point}
    check_shapes(folder.name, expected, {name: tuple(shapes[name]) for name in expected.keys() & shapes.keys()})
    fill_module(model, read_tensors(weights, expected), folder.name, lambda key: dtype)
    # The only buffers are the position numbers. They are computed, not loaded.
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, torch.arange(buffer.shape[-1])[None], persistent=False)
    model.to(device)

    file = folder / "tokenizer_config.json"
    if file.exists():
        known_fields(shown(file), read_json(file), {"truncation_side": same("right")})
    file, longest = folder / "tokenizer.json", config.text_config.max_position_embeddings
    encode = json_tokenizer(read_bytes(file, LARGEST_TEXT), shown(file), config.text_config.vocab_size).encode

    file, pixels = folder / "preprocessor_config.json", config.vision_config.image_size
    arguments = known_fields(shown(file), read_json(file), PROCESSOR)
    with naming(file):
        processor = CLIPImageProcessor(**arguments)
        # This image is not square, so without a crop its result has another size than expected.
        values = processor(Image.new("RGB", (64, 48)), return_tensors="pt")["pixel_values"]
    if values.shape != (1, 3, pixels, pixels):
        got = " x ".join(map(str, values.shape[2:]))
        raise CheckpointError(
            f"{shown(file)}: makes images of {got} pixels, expected {pixels} x {pixels} as in config.json; {REDOWNLOAD}"
        )

    @torch.no_grad()
    def score(images: torch.Tensor, prompt: str) -> torch.Tensor:
        check_text("prompt", prompt)
        tokens = encode(prompt)
        tokens = tokens if len(tokens) <= longest else [*tokens[: longest - 1], tokens[-1]]
        # Inside a host the model may have moved since the last call.
        place = model.logit_scale
        ids = torch.tensor([tokens], device=place.device)
        scores = []
        for image in images:
            # One at a time, so that an image has the same score in any batch.
            values = processor(Image.fromarray(levels(image)), return_tensors="pt")["pixel_values"].to(place)
            result = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=values)
            scores.append(result.logits_per_image[0, 0].float().cpu())
        return torch.stack(scores)

    return Scorer(folder.name, model, score)


def known_fields(name: str, content: object, fields: Mapping[str, Check]) -> Json:
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is {brief(content)}, expected an object; {REDOWNLOAD}")
    refuse_code(name, content)
    for field, check in fields.items():
        if field in content and not check(content[field]):
            raise CheckpointError(f"{name}: {field} is {brief(content[field])}, which no CLIP has; {SUITABLE}")
    return {field: content[field] for field in fields if content.get(field) is not None}


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn errors of transformers, which raises many kinds, into a CheckpointError that names `file`."""
    try:
        yield
    except Exception as error:
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(f"{shown(file)}: transformers cannot use it ({reason}); {REDOWNLOAD}") from None


def read_weights(folder: Path) -> Weights:
    with readable(folder):
        if folder.is_file():
            raise CheckpointError(f"{folder.name}: got one file, expected a folder with config.json; {SUITABLE}")
        if not folder.exists():
            raise MissingFileError(
                f"scorer: no folder {brief(folder.name)}, expected the folder of a CLIP model; check its spelling"
            )
        if (folder / WEIGHTS).exists():
            return read_header(folder / WEIGHTS)
        if (folder / INDEX).exists():
            return read_sharded(folder / INDEX)
    raise MissingFileError(f"{folder.name}: no {WEIGHTS}; download it from the page of the model")


class Best(NamedTuple):
    """Keep the `keep` best of `of` images of each prompt, by the scorer in the folder `scorer`."""

    keep: int
    of: int
    scorer: Path

    def describe(self) -> Json:
        """Return the entry of the manifest: these options, and the digest of the scorer's files."""
        check_text("scorer", self.scorer.name, RENAME)
        names = ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")
        files = {header.file for header in read_weights(self.scorer).headers.values()}
        # `load_scorer` names a file that is missing, or a pipe in its place.
        files |= {self.scorer / name for name in names if (self.scorer / name).is_file()}
        digests = digest_files(files, lambda count, total: None)
        weights = digest_json([digests[file] for file in sorted(digests)])
        return {"best": self.keep, "of": self.of, "scorer": self.scorer.name, "scorer_weights": weights}


class Pick(NamedTuple):
    """An image that is among the best of its prompt."""

    image: ImageSpec
    # [3, H, W] in [-1, 1].
    pixels: torch.Tensor
    # NaN: the scorer gave NaN or infinity.
    score: float
    # Among the images of the prompt, from 1.
    rank: int

    def describe(self, named: bool = False) -> Json:
        """Return score and rank, and with `named` also the number of the prompt and the seed.

        A score that is not finite becomes None, because JSON has no NaN.
        """
        names = {"prompt": self.image.prompt, "seed": self.image.seed} if named else {}
        score = round(self.score, 4) if math.isfinite(self.score) else None
        return {**names, "score": score, "rank": self.rank}


def find_best(keep: int | None, of: int | None, scorer: str | Path | None, count: int = 1) -> Best | None:
    """Return the options as a Best, or None without any of the first three. Raises InputError if only some are set."""
    if keep is of is scorer is None:
        return None
    if keep is None or of is None or scorer is None:
        raise InputError("best: got only a part of best, of and scorer; give all three, or none")
    if count != 1:
        raise InputError(f"count: got {count} with best, expected 1; set of, the number of images to choose from")
    check_whole("of", of, 1, LARGEST_COUNT)
    check_whole("best", keep, 1, of)
    return Best(int(keep), int(of), Path(scorer))


def place_scorer(best: Best, request: Request) -> Scorer:
    device = request.devices[0]
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, request.settings.dtype)
    return load_scorer(best.scorer, device, dtype)


def best_first(score: float) -> float:
    """Return a sort key that puts high scores first, and scores that are not finite last."""
    return -score if math.isfinite(score) else math.inf


def generate_picks(backend: Backend, request: Request, best: Best, scorer: Scorer) -> Generator[Pick, None, None]:
    """Yield the best images of each prompt in the order of their ranks, as soon as all images of the prompt are scored.

    Only the best images so far stay in memory. Of equal scores the lower seed ranks first, so the choice does not
    depend on the order in which images finish. An image without a finite score ranks last, with a warning.
    A scorer whose first `of` scores are all not finite never works, which is an error. An image that fails is left out.
    """
    finite = not_finite = 0
    failed: dict[int, str] = {}
    incomplete = False
    images_seen: Counter[int] = Counter()
    best_so_far: defaultdict[int, list[Pick]] = defaultdict(list)
    with closing(backend(request)) as generated:
        for image, pixels in generated:
            ranked = best_so_far[image.prompt]
            images_seen[image.prompt] += 1
            if isinstance(pixels, FailedImage):
                failed[image.number] = pixels.reason
                logger.warning("image of prompt %d, seed %d failed: %s", image.prompt, image.seed, pixels.reason)
            else:
                score = float(scorer.score(pixels[None], request.workload.prompts[image.prompt])[0])
                if math.isfinite(score):
                    finite += 1
                else:
                    not_finite += 1
                    name, which = best.scorer.name, f"prompt {image.prompt}, seed {image.seed}"
                    if not finite and not_finite >= best.of:
                        raise CheckpointError(
                            f"scorer: {name} gave {score} for {which}, and no number for any image before; "
                            "use another scorer"
                        )
                    logger.warning(
                        "scorer: %s gave %s for %s, expected a number; this image ranks last", name, score, which
                    )
                    score = math.nan
                ranked.append(Pick(image, pixels, score, 0))
                ranked.sort(key=lambda pick: (best_first(pick.score), pick.image.number))
                del ranked[best.keep :]
            if images_seen[image.prompt] == best.of:
                yield from (pick._replace(rank=rank) for rank, pick in enumerate(best_so_far.pop(image.prompt), 1))
                incomplete |= len(ranked) < best.keep
    if incomplete:
        raise failed_images(failed, "use another prompt or other seeds")


def without_finished(workload: Workload, best: Best) -> Workload:
    """Return `workload` with all images done of the prompts whose best images exist, and no others.

    Images that were not chosen are not stored, so all images of an unfinished prompt are generated again.
    """
    finished = [0] * len(workload.prompts)
    for image in workload.images:
        finished[image.prompt] += image.number in workload.done
    numbers = {image.number for image in workload.images if finished[image.prompt] >= best.keep}
    return workload._replace(done=frozenset(numbers))
