"""Draw the image that `make gpu` compares with: `python -m demo.expected FOLDER [PROMPT]`, on the CPU in float32."""

import json
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin

from sana_core import generate
from sana_core.runtime.atomic_files import digest_file
from sana_core.runtime.image_files import levels

PROMPT = "a watercolour of a red lighthouse on the sea at dusk"
SETTINGS = {"width": 512, "height": 512, "steps": 20, "guidance": 4.5, "seed": 0}


def main(folder: Path, prompt: str) -> None:
    digests = {file.relative_to(folder).as_posix(): digest_file(file) for file in sorted(folder.rglob("*.safetensors"))}
    said = PngImagePlugin.PngInfo()
    said.add_text("sana", json.dumps({"prompt": prompt, **SETTINGS, "digests": digests}))
    drawn = generate([prompt], folder, devices=["cpu"], **SETTINGS)
    Image.fromarray(levels(drawn[0])).save(folder / "expected.png", pnginfo=said, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else PROMPT)
