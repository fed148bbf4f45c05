"""How programs that train LoRAs write a layer's name, and behind it its two matrices."""

DIALECTS = {
    "diffusers": ("transformer.{name}", ".lora_A.weight", ".lora_B.weight"),
    "peft": ("base_model.model.{name}", ".lora_A.weight", ".lora_B.weight"),
    "peft with an adapter's name": ("base_model.model.{name}", ".lora_A.default.weight", ".lora_B.default.weight"),
    "bare": ("{name}", ".lora_A.weight", ".lora_B.weight"),
    "kohya": ("lora_unet_{flat}", ".lora_down.weight", ".lora_up.weight"),
    "onetrainer": ("lora_transformer_{flat}", ".lora_down.weight", ".lora_up.weight"),
    "simpletuner": ("lycoris_{flat}", ".lora_down.weight", ".lora_up.weight"),
    "core": ("diffusion_model.{name}", ".lora_down.weight", ".lora_up.weight"),
}
# Names that ComfyUI's own loader does not know: wrappers of compiling, DDP and PEFT.
WRAPPED = {
    "compiled": ("transformer._orig_mod.{name}", ".lora_A.weight", ".lora_B.weight"),
    "ddp, peft": ("module.base_model.model.{name}", ".lora_A.default_0.weight", ".lora_B.default_0.weight"),
    "unet": ("unet.{name}", ".lora_A.weight", ".lora_B.weight"),
    "kohya, compiled": ("lora_unet__orig_mod_{flat}", ".lora_down.weight", ".lora_up.weight"),
}
