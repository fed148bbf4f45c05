"""Graphs of ComfyUI_ExtraModels and its fork, by the schemas of their nodes."""


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def old_graph(
    latent="EmptySanaLatentImage", name="sana.safetensors", gemma="gemma.safetensors", vae="dc-ae.safetensors"
):
    """Their text to image, up to core's KSampler and VAE Decode, with a file of each kind."""
    return {
        "model": node("SanaCheckpointLoader", ckpt_name=name, model="SanaMS_1600M_P1_D20", dtype="BF16"),
        "gemma": node("GemmaLoader", model_name=gemma, device="cpu", dtype="default"),
        "vae": node("ExtraVAELoader", vae_name="dc-ae.safetensors", vae_type="dcae-f32c32-sana-1.0", dtype="auto"),
        "positive": node("SanaTextEncode", text="a red circle on a blue background", GEMMA=["gemma", 0]),
        "negative": node("GemmaTextEncode", text="", GEMMA=["gemma", 0]),
        "noted": node("SanaResolutionCond", cond=["positive", 0], width=1024, height=1024),
        "empty": node(latent, width=128, height=96, batch_size=1),
        "sample": node(
            "KSampler",
            model=["model", 0],
            positive=["noted", 0],
            negative=["negative", 0],
            latent_image=["empty", 0],
            seed=3,
            steps=2,
            cfg=4.5,
            sampler_name="euler",
            scheduler="normal",
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "catch": node("Catch", value=["decode", 0], name="image"),
    }
