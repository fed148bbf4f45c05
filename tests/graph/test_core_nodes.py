"""Core's nodes for sampling on our MODEL, and our sampling on core's objects."""

import gc
import shutil
import weakref

import pytest
import torch
from fake_cuda import pack
from in_process import AnyValue, NodeError
from loading import ksampler, through
from safetensors.torch import save_file
from variants import make_variant

from sana_core.sampling.schedules import flow_dpm_sigmas

pytestmark = pytest.mark.usefixtures("one_load")


def latent(host, graph, **options):
    return host.run(graph, **options)["latent"]["samples"]


@pytest.mark.parametrize("sampler", ["flow_dpmpp_2m", "flow_euler", "flow_dpmpp_3m", "flow_dpmpp_1"])
def test_our_schedule_and_sampler_in_core_s_custom_sampling_equal_sana_sampler(host, base_graph, custom_graph, sampler):
    ours = latent(host, base_graph(sampler=sampler))
    torch.testing.assert_close(latent(host, custom_graph(sampler)), ours, atol=1e-5, rtol=0)


def test_a_sampler_that_another_pack_wraps_generates_the_same_image(host, custom_graph):
    """Packs such as Detail Daemon call `sampler_function` of a SAMPLER themselves."""
    import comfy.samplers

    graph = custom_graph("flow_euler")
    expected = latent(host, graph)
    graph["catch sampler"] = ("Catch", {"value": ["select", 0], "name": "sampler"})
    ours = host.run(graph)["sampler"]

    def wrapped(model, x, sigmas, extra_args=None, callback=None, disable=None):
        arguments = {"extra_args": extra_args, "callback": callback, "disable": disable}
        return ours.sampler_function(model, x, sigmas, **arguments, **type(ours)("flow_euler").extra_options)

    graph["select"] = ("AnyValue", {"value": comfy.samplers.KSAMPLER(wrapped)})
    torch.testing.assert_close(latent(host, graph), expected, atol=2e-2, rtol=0)


def test_the_scheduler_gives_the_sigmas_with_the_shift_of_the_model(host, custom_graph):
    graph = custom_graph()
    graph["shift"] = ("ModelSamplingSD3", {"model": ["load", 0], "shift": 6.0})
    graph["sigmas"][1].update(model=["shift", 0], steps=20)
    graph["catch sigmas"] = ("Catch", {"value": ["sigmas", 0], "name": "sigmas"})
    assert torch.equal(host.run(graph)["sigmas"], flow_dpm_sigmas(20, 6.0))
    graph["sigmas"][1].update(denoise=0.5)
    assert torch.equal(host.run(graph)["sigmas"], flow_dpm_sigmas(40, 6.0)[-21:])
    graph["sigmas"][1].update(denoise=0.0)
    assert len(host.run(graph)["sigmas"]) == 0


@pytest.mark.parametrize("sampler", ["flow_euler", "flow_dpmpp_3m"])
def test_our_samplers_take_core_s_schedules(host, custom_graph, sampler):
    import comfy.samplers

    pictures = []
    for scheduler in comfy.samplers.SCHEDULER_NAMES:
        graph = custom_graph(sampler, steps=12)
        graph["sigmas"] = (
            "BasicScheduler",
            {"model": ["load", 0], "scheduler": scheduler, "steps": 12, "denoise": 1.0},
        )
        pictures.append(host.run(graph)["image"])
    assert all(picture.isfinite().all() for picture in pictures)
    # karras and exponential spend their steps elsewhere; most draw the same picture
    distances = sorted((picture - pictures[0]).abs().mean().item() for picture in pictures)
    assert distances[len(distances) // 2] < 0.05


@pytest.mark.parametrize(
    "sampler_name", ["dpmpp_2m", "heun", "uni_pc", "dpmpp_2m_sde", "euler_ancestral", "deis", "lcm"]
)
def test_core_s_samplers_draw(host, base_graph, sampler_name):
    picture = host.run(ksampler(base_graph(), sampler_name=sampler_name, scheduler="simple", steps=14))["image"]
    assert picture.isfinite().all() and picture.std() > 0.1


def test_splitting_the_sigmas_in_two_samplings_continues_the_picture(host, custom_graph):
    graph = custom_graph("flow_euler")
    undivided = latent(host, graph)
    graph["split"] = ("SplitSigmas", {"sigmas": ["sigmas", 0], "step": 4})
    graph["no noise"] = ("DisableNoise", {})
    first = {**graph["sample"][1], "sigmas": ["split", 0]}
    graph["first"] = ("SamplerCustomAdvanced", first)
    second = {**first, "sigmas": ["split", 1], "noise": ["no noise", 0], "latent_image": ["first", 0]}
    graph["sample"] = ("SamplerCustomAdvanced", second)
    torch.testing.assert_close(latent(host, graph), undivided, atol=1e-4, rtol=0)


def inpaint(graph):
    """Inpaint the left half of the finished image."""
    graph["solid"] = ("SolidMask", {"value": 0.0, "width": 128, "height": 128})
    graph["half"] = ("SolidMask", {"value": 1.0, "width": 64, "height": 128})
    compose = {"destination": ["solid", 0], "source": ["half", 0], "x": 0, "y": 0, "operation": "add"}
    graph["mask"] = ("MaskComposite", compose)
    graph["masked"] = ("SetLatentNoiseMask", {"samples": ["sample", 0], "mask": ["mask", 0]})
    graph["again"] = ("SanaNodesSampler", {**graph["sample"][1], "latent_image": ["masked", 0], "seed": 11})
    graph["catch again"] = ("Catch", {"value": ["again", 0], "name": "again"})
    return graph


def test_an_inpaint_mask_keeps_the_rest(host, base_graph):
    got = host.run(inpaint(base_graph()))
    before, after = got["latent"]["samples"], got["again"]["samples"]
    torch.testing.assert_close(after[..., 2:], before[..., 2:], atol=1e-4, rtol=0)
    assert (after[..., :2] - before[..., :2]).abs().mean() > 0.05


def test_differential_diffusion_takes_a_soft_mask(host, base_graph):
    graph = inpaint(base_graph())
    graph["solid"][1]["value"] = 0.4
    graph["differential"] = ("DifferentialDiffusion", {"model": ["load", 0]})
    graph["again"][1]["model"] = ["differential", 0]
    got = host.run(graph)
    change = (got["again"]["samples"] - got["latent"]["samples"]).abs().mean((0, 1, 2))
    assert change[:2].mean() > change[2:].mean() > 0


def test_a_second_pass_over_an_upscaled_latent(host, base_graph):
    graph = base_graph()
    graph["larger"] = ("LatentUpscaleBy", {"samples": ["sample", 0], "upscale_method": "bislerp", "scale_by": 2.0})
    graph["again"] = ("SanaNodesSampler", {**graph["sample"][1], "latent_image": ["larger", 0], "denoise": 0.5})
    graph["decode"][1]["samples"] = ["again", 0]
    picture = host.run(graph)["image"]
    assert picture.shape == (1, 256, 256, 3) and picture.isfinite().all() and picture.std() > 0.1


def test_a_repeated_latent_is_a_batch(host, base_graph):
    graph = base_graph(seed=7)
    graph["repeat"] = ("RepeatLatentBatch", {"samples": ["empty", 0], "amount": 2})
    graph["sample"][1]["latent_image"] = ["repeat", 0]
    torch.testing.assert_close(latent(host, graph), latent(host, base_graph(seed=7, batch_size=2)), atol=1e-5, rtol=0)


def test_an_area_in_pixels_is_that_in_percent_and_outside_the_image_it_is_refused(host, base_graph):
    def draw(node, **area):
        graph = base_graph(steps=4)
        graph["other"] = ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "a green square", "instruction": True})
        graph["area"] = (node, {"conditioning": ["other", 0], "strength": 1.0, **area})
        graph["both"] = ("ConditioningCombine", {"conditioning_1": ["positive", 0], "conditioning_2": ["area", 0]})
        graph["sample"][1]["positive"] = ["both", 0]
        return latent(host, graph)

    pixels = draw("ConditioningSetArea", width=64, height=96, x=64, y=32)
    assert torch.equal(pixels, draw("ConditioningSetAreaPercentage", width=0.5, height=0.75, x=0.5, y=0.25))
    # a width that leaves the image ends with it
    assert torch.equal(pixels, draw("ConditioningSetArea", width=512, height=96, x=64, y=32))
    with pytest.raises(
        NodeError, match="^positive: got an area that begins at x 128, y 0 of an image of 128 x 128; move"
    ):
        draw("ConditioningSetArea", width=64, height=64, x=128, y=0)


def test_a_lora_on_a_hook_acts_only_while_its_keyframes_say_so(host, base_graph, install):
    generator = torch.Generator().manual_seed(0)
    layer = "diffusion_model.transformer_blocks.2.attn2.to_k.lora"
    tensors = {f"{layer}_A.weight": torch.randn(4, 160, generator=generator)}
    tensors[f"{layer}_B.weight"] = torch.randn(160, 4, generator=generator)
    name = install("loras", "keys.safetensors", tensors)

    def run(strength, keyframes):
        graph = base_graph()
        hook = {"lora_name": name, "strength_model": strength, "strength_clip": 0.0}
        graph["hook"] = ("CreateHookLora", hook)
        for i, (multiplier, start) in enumerate(keyframes):
            key = {"strength_mult": multiplier, "start_percent": start}
            if i:
                key["prev_hook_kf"] = [f"key {i - 1}", 0]
            graph[f"key {i}"] = ("CreateHookKeyframe", key)
        graph["scheduled"] = ("SetHookKeyframes", {"hooks": ["hook", 0], "hook_kf": [f"key {len(keyframes) - 1}", 0]})
        for text in ("positive", "negative"):
            graph["hooked " + text] = (
                "ConditioningSetProperties",
                {"cond_NEW": [text, 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["scheduled", 0]},
            )
            graph["sample"][1][text] = ["hooked " + text, 0]
        return latent(host, graph)

    plain = latent(host, base_graph())
    torch.testing.assert_close(run(1.0, [(0.0, 0.0)]), plain, atol=1e-5, rtol=0)
    constant, scheduled = run(1.0, [(1.0, 0.0)]), run(1.0, [(1.0, 0.0), (0.0, 0.5)])
    assert (constant - plain).abs().max() > 1e-2
    # Cached keys would still contain the LoRA that the second keyframe removes.
    assert (scheduled - constant).abs().max() > 1e-3 and (scheduled - plain).abs().max() > 1e-3


def test_the_prompt_s_keys_are_computed_once_a_sampling_and_not_kept_after_it(host, base_graph):
    graph = base_graph(batch_size=2)
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    transformer = host.run(graph)["model"].model.diffusion_model
    calls = []
    attention = transformer.transformer_blocks[0].attn2
    hook = attention.to_k.register_forward_hook(lambda module, args, out: calls.append(weakref.ref(out)))
    for sampler in (graph, ksampler(graph)):
        calls.clear()
        again = {**sampler, "sample": (sampler["sample"][0], {**sampler["sample"][1], "seed": 21})}
        host.run(again, keep_cache=True)
        gc.collect()
        assert len(calls) == 1 and calls[0]() is None
    hook.remove()


def test_a_list_of_prompts_is_one_batch(host, base_graph):
    prompts = ["a red circle on a blue background", "a green square on a white background"]
    graph = base_graph(seed=7)
    graph["list"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "\n\n".join(prompts), "instruction": True})
    graph["empty"][1]["batch_size"] = ["list", 1]
    graph["sample"][1]["positive"] = ["list", 0]
    batch = latent(host, graph)
    for k, prompt in enumerate(prompts):
        alone = latent(host, base_graph(seed=7 + k, text=prompt))
        torch.testing.assert_close(batch[k : k + 1], alone, atol=1e-4, rtol=0)


def test_a_list_of_texts_from_another_node_is_one_batch_and_a_short_list_repeats(host, base_graph, monkeypatch):
    texts = type("Texts", (AnyValue,), {"OUTPUT_IS_LIST": (True,)})
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "Texts", texts)
    graph = base_graph(batch_size=3)
    graph["texts"] = ("Texts", {"value": ("a red circle", "a blue cross")})
    graph["list"] = ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": ["texts", 0], "instruction": True})
    graph["sample"][1]["positive"] = ["list", 0]
    three = latent(host, graph)
    graph["list"][1]["prompts"] = "a red circle\na blue cross\na red circle"
    torch.testing.assert_close(latent(host, graph), three, atol=1e-5, rtol=0)


def test_queueing_again_with_the_same_text_encodes_nothing(host, base_graph):
    graph = base_graph()
    graph["catch clip"] = ("Catch", {"value": ["load", 1], "name": "clip"})
    gemma = host.run(graph)["clip"].cond_stage_model.gemma
    calls = []
    hook = gemma.register_forward_hook(lambda *args: calls.append(1))
    host.run({**graph, "sample": (graph["sample"][0], {**graph["sample"][1], "seed": 99})}, keep_cache=True)
    assert not calls
    host.run(
        {**graph, "positive": (graph["positive"][0], {**graph["positive"][1], "text": "a cross"})}, keep_cache=True
    )
    hook.remove()
    assert len(calls) == 1


def test_model_defaults_draw_what_the_same_numbers_draw(host, base_graph):
    defaults = base_graph(steps=3, guidance=1.0, sampler="flow_euler", model_defaults=True)
    assert torch.equal(latent(host, defaults), latent(host, base_graph(steps=20, guidance=4.5)))


def test_taesana_previews_where_its_file_is(host, base_graph, checkpoint, monkeypatch):
    import folder_paths
    import latent_preview

    def run_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.manual_seed(0)
    decoder = pack("nodes.host.sampling.latents").taesana_decoder()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    # a checkpoint without colours of its own has the latents that TAESANA reads
    folder = shutil.copytree(checkpoint, host.models / "diffusers" / "plain")
    (folder / "preview.json").unlink()
    (host.models / "vae_approx").mkdir(exist_ok=True)
    file = host.models / "vae_approx" / "taesana_decoder.safetensors"
    try:
        graph = base_graph(steps=2)
        graph["load"][1]["model"] = "plain"
        graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
        latent_format = host.run(graph)["model"].model.latent_format
        x0 = torch.randn(1, 32, 4, 6)

        def shown(x0):
            return latent_preview.get_previewer(x0.device, latent_format).decode_latent_to_preview(x0)

        assert shown(x0).size == (6, 4)
        save_file(decoder.state_dict(), file)
        folder_paths.filename_list_cache.clear()
        assert shown(x0).size == (192, 128)
        expected, got = (decoder(x0)[0].clamp(0, 1) * 255).movedim(0, -1), bytearray(shown(x0).tobytes())
        assert (torch.frombuffer(got, dtype=torch.uint8).view(128, 192, 3) - expected).abs().max() <= 1.01
        assert host.run(graph)["latent"]["samples"].isfinite().all()
        # A large latent is decoded at the size of ComfyUI's previews.
        assert shown(torch.randn(1, 32, 128, 64)).size == (256, 512)
        # When memory runs out, the preview is one pixel per cell, and the sampling continues.
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Upsample, "forward", run_out)
            assert shown(x0).size == (6, 4)
            assert host.run(graph)["latent"]["samples"].isfinite().all()
    finally:
        shutil.rmtree(folder)
        file.unlink(missing_ok=True)
        folder_paths.filename_list_cache.clear()


@pytest.mark.slow
def test_the_compile_node_of_core_draws_the_same(host, base_graph, checkpoint, request):
    # one block: a compilation takes seconds a block
    folder = make_variant(checkpoint, host.models / "diffusers" / "shallow", num_layers=1)
    request.addfinalizer(lambda: shutil.rmtree(folder))
    graph = base_graph(steps=2)
    graph["load"][1]["model"] = "shallow"
    plain = latent(host, graph)
    torch.testing.assert_close(
        latent(host, through(graph, "TorchCompileModel", backend="inductor")), plain, atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("width, height", [(64, 128), (512, 512)])
def test_latent_upscale_assumes_cells_of_8_pixels(host, base_graph, width, height):
    """docs/core-nodes.md therefore tells users to enter a quarter of the pixels."""
    graph = base_graph(steps=1)
    size = {"upscale_method": "nearest-exact", "width": width, "height": height, "crop": "disabled"}
    graph["larger"] = ("LatentUpscale", {"samples": ["sample", 0], **size})
    graph["catch latent"][1]["value"] = ["larger", 0]
    assert host.run(graph)["latent"]["samples"].shape[2:] == (height // 8, width // 8)


@pytest.mark.parametrize("width, height", [(128, 64), (120, 128)])
def test_latent_crop_assumes_cells_of_8_pixels(host, width, height):
    part = {"width": width, "height": height, "x": 0, "y": 0}
    graph = {
        "empty": ("SanaNodesEmptyLatent", {"width": 512, "height": 512, "batch_size": 1}),
        "part": ("LatentCrop", {"samples": ["empty", 0], **part}),
        "catch": ("Catch", {"value": ["part", 0], "name": "part"}),
    }
    assert host.run(graph)["part"]["samples"].shape[2:] == (height // 8, width // 8)
