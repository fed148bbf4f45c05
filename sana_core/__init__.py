"""SANA outside ComfyUI: load, encode, sample, decode. Heavy libraries are imported where they are used."""

from .batch.best import load_scorer
from .checkpoints import (
    inspect_checkpoint,
    load_autoencoder,
    load_controlnet,
    load_text_encoder,
    load_transformer,
    load_video_transformer,
)
from .decode import decode_latents, encode_images
from .edit import edit_images
from .errors import (
    CheckpointError,
    ClusterError,
    ExistingFileError,
    FailedImagesError,
    InputError,
    InUseError,
    MissingFileError,
    OutputError,
    ReadError,
    SanaError,
    TrainingError,
    VersionError,
)
from .generate import generate, generate_best
from .memory import plan_memory
from .model.text import encode_prompts
from .predict import predict_velocity
from .video.generate import generate_video
from .video.latents import plan_video

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ExistingFileError",
    "FailedImagesError",
    "InUseError",
    "InputError",
    "MissingFileError",
    "OutputError",
    "ReadError",
    "SanaError",
    "TrainingError",
    "VersionError",
    "decode_latents",
    "edit_images",
    "encode_images",
    "encode_prompts",
    "generate",
    "generate_best",
    "generate_video",
    "inspect_checkpoint",
    "load_autoencoder",
    "load_controlnet",
    "load_scorer",
    "load_text_encoder",
    "load_transformer",
    "load_video_transformer",
    "plan_memory",
    "plan_video",
    "predict_velocity",
]
