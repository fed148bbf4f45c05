"""Every part of ComfyUI that the pack uses. A failure names the part that moved and the file of ours that needs it."""

import importlib
import inspect

import pytest
import torch

# {callable: (arguments, file of ours)}: arguments that we pass, or that ComfyUI passes to our replacement.
CALLS = {
    "comfy.controlnet.ControlNet.copy_to": ("c", "controlnet.py"),
    "comfy.controlnet.ControlNet.deepclone_multigpu": ("load_device autoregister", "controlnet.py"),
    "comfy.controlnet.ControlNet.get_control": ("x_noisy t cond batched_number transformer_options", "controlnet.py"),
    "comfy.controlnet.ControlNet.pre_run": ("model percent_to_timestep_function", "controlnet.py"),
    "comfy.conds.CONDRegular.can_concat": ("other", "model.py"),
    "comfy.conds.CONDRegular.concat": ("others", "model.py"),
    "comfy.conds.CONDRegular.process_cond": ("batch_size", "model.py"),
    "comfy.conds.CONDRegular.size": ("", "model.py"),
    "comfy.float.stochastic_rounding": ("value dtype seed", "job.py"),
    "comfy.lora.calculate_weight": ("patches weight key", "load_model.py, job.py"),
    "comfy.lora.model_lora_keys_clip": ("model key_map", "load_model.py"),
    "comfy.lora.model_lora_keys_unet": ("model key_map", "compat.py (add_lora_names)"),
    "comfy.model_base.BaseModel.process_latent_out": ("latent", "batch/run.py"),
    "comfy.model_management.archive_model_dtypes": ("model", "weights.py, vae.py"),
    "comfy.model_management.cast_to_device": ("tensor device dtype copy", "job.py"),
    "comfy.model_management.cuda_device_context": ("device", "devices.py, vae.py"),
    "comfy.model_management.free_memory": ("memory_required device", "training/run.py, devices.py, vae.py"),
    "comfy.model_management.get_all_torch_devices": ("", "devices.py, split.py, vae.py, folders.py"),
    "comfy.model_management.get_free_memory": ("dev", "devices.py, vae.py"),
    "comfy.model_management.get_total_memory": ("dev", "computer.py, vae.py, training/run.py"),
    "comfy.model_management.loaded_models": ("", "devices.py"),
    "comfy.model_management.lora_compute_dtype": ("device", "job.py"),
    "comfy.model_management.minimum_inference_memory": ("", "training/run.py"),
    "comfy.model_management.resolve_gpu_device_option": ("option", "devices.py"),
    "comfy.model_management.soft_empty_cache": ("", "training/run.py"),
    "comfy.model_management.supports_cast": ("device dtype", "clip.py"),
    "comfy.model_management.throw_exception_if_processing_interrupted": ("", "every loop"),
    "comfy.model_management.unet_dtype": ("device model_params supported_dtypes weight_dtype", "load_model.py"),
    "comfy.model_management.unet_manual_cast": ("weight_dtype inference_device supported_dtypes", "load_model.py"),
    "comfy.model_prefetch.make_prefetch_queue": ("queue device transformer_options", "compat.py (prefetched_blocks)"),
    "comfy.model_prefetch.prefetch_queue_pop": ("queue device module", "compat.py (prefetched_blocks)"),
    "comfy.model_patcher.ModelPatcher._load_list": ("for_dynamic", "weights.py (LookupPatcher)"),
    "comfy.model_patcher.ModelPatcher.add_callback_with_key": ("call_type key callback", "weights.py, vae.py"),
    "comfy.model_patcher.ModelPatcher.clone": ("model_override", "sampling/split.py"),
    "comfy.model_patcher.ModelPatcher.deepclone_multigpu": ("new_load_device", "sampling/split.py"),
    "comfy.model_patcher.ModelPatcher.get_clone_model_override": ("", "sampling/split.py"),
    "comfy.model_patcher.ModelPatcher.get_free_memory": ("device", "compat.py (free_memory)"),
    "comfy.model_patcher.ModelPatcher.get_key_patches": ("filter_prefix", "job.py"),
    "comfy.model_patcher.ModelPatcher.pre_run": ("", "split.py"),
    "comfy.sampler_helpers.get_models_from_cond": ("cond model_type", "split.py (additional_models)"),
    "comfy.samplers.CFGGuider.outer_sample": ("noise", "split.py"),
    "comfy.ops.cast_bias_weight": ("s input dtype offloadable", "weights.py"),
    "comfy.ops.mixed_precision_ops": ("quant_config compute_dtype full_precision_mm", "clip.py"),
    "comfy.ops.pick_operations": (
        "weight_dtype compute_dtype load_device fp8_optimizations model_config",
        "load_model.py",
    ),
    "comfy.ops.run_every_op": ("", "weights.py"),
    "comfy.ops.uncast_bias_weight": ("s weight bias offload_stream", "weights.py"),
    "comfy.samplers.KSAMPLER.sample": (
        "model_wrap sigmas extra_args callback noise latent_image denoise_mask disable_pbar",
        "sampler.py",
    ),
    "comfy.samplers.calc_cond_batch": ("model conds x_in timestep model_options", "guidance.py"),
    "comfy.sd.VAE": ("sd device dtype", "compat.py (empty_vae)"),
    "comfy.supported_models_base.ClipTarget": ("tokenizer clip", "clip.py"),
    "comfy.taesd.taesd.Block": ("n_in n_out", "latents.py"),
    "comfy.taesd.taesd.conv": ("n_in n_out", "latents.py"),
    "comfy.text_encoders.llama.BaseGenerate.sample_token": (
        "logits temperature top_k top_p min_p repetition_penalty token_history generator",
        "clip.py (token_sampler)",
    ),
    "comfy.sd.VAE.spacial_compression_encode": ("", "controlnet.py (encode_hints)"),
    "comfy.utils.common_upscale": ("samples width height upscale_method crop", "controlnet.py (encode_hints)"),
    "comfy.utils.ProgressBar.update_absolute": ("value total preview", "view.py, batch/run.py, report.py"),
    "comfy.utils.load_torch_file": ("ckpt safe_load", "weights.py, latents.py"),
    "comfy.utils.string_to_seed": ("data", "job.py"),
    "folder_paths.cached_filename_list_": ("folder_name", "compat.py (survive_deleted_folders)"),
    "folder_paths.get_input_subfolders": ("", "folders.py"),
    "latent_preview.get_previewer": ("device latent_format", "devices.py, batch/run.py, sampler.py"),
    "latent_preview.LatentPreviewer.decode_latent_to_preview_image": ("preview_format x0", "devices.py, batch/run.py"),
    "server.PromptServer.add_on_prompt_handler": ("handler", "compat.py"),
}
# names that are no functions
NAMES = {
    "comfy.model_sampling.CONST.noise_scaling": "model.py (check_flow)",
    "comfy.model_sampling.ModelSamplingFlux": "sampler.py (model_shift)",
    "comfy.ops.CastWeightBiasOp.comfy_cast_weights": "weights.py",
    "comfy.ops.CastWeightBiasOp.weight_function": "weights.py",
    "comfy.ops.disable_weight_init.Linear": "weights.py, clip.py",
    "comfy.ops.fp8_ops.Linear.forward_comfy_cast_weights": "weights.py",
    "comfy.ops.manual_cast.Conv2d": "weights.py, clip.py",
    "comfy.patcher_extension.CallbacksMP.ON_LOAD": "weights.py, vae.py",
    "comfy.patcher_extension.WrappersMP.CALC_COND_BATCH": "guidance.py",
    "comfy.model_patcher.LowVramPatch": "compat.py (is_half_unloaded)",
    "comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL": "model.py",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL": "compat.py, devices.py",
    "comfy.patcher_extension.WrappersMP.OUTER_SAMPLE": "load_model.py, devices.py, split.py",
    "comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING": "devices.py, split.py",
    "comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE": "guidance.py",
    "comfy.text_encoders.pixeldit.PixelDiTGemma2Tokenizer": "compat.py (pixeldit_tokenizer)",
}


def find(name):
    """The object with a dotted name, or None."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part, None)
        return thing
    return None


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_there_and_take_what_they_took(host, name):
    arguments, ours = CALLS[name]
    function = find(name)
    assert function is not None, f"ComfyUI has no {name} any more; nodes/host/{ours} calls it"
    have = list(inspect.signature(function).parameters)
    missing = [argument for argument in arguments.split() if argument not in have]
    assert not missing, f"ComfyUI's {name} takes no {', '.join(missing)} any more but {have}; see nodes/host/{ours}"
    order = [argument for argument in have if argument in arguments.split()]
    assert order == arguments.split(), f"ComfyUI's {name} takes {have}, in another order; see nodes/host/{ours}"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(host, name):
    assert find(name) is not None, f"ComfyUI has no {name} any more; nodes/host/{NAMES[name]} needs it"


def test_a_patcher_has_the_collections_that_travel_or_are_refused(host):
    import comfy.model_patcher
    from fake_cuda import pack

    cpu, compat = torch.device("cpu"), pack("nodes.host.compat")
    patcher = comfy.model_patcher.ModelPatcher(torch.nn.Module(), cpu, cpu)
    held = {name for name, value in vars(patcher).items() if isinstance(value, dict | list | set)}
    gone = compat.PATCH_FIELDS - held
    assert not gone, f"ComfyUI's ModelPatcher has no {gone} any more; see PATCH_FIELDS in nodes/host/compat.py"
    new = held - compat.PATCH_FIELDS - compat.STATE_FIELDS
    assert not new, (
        f"ComfyUI's ModelPatcher has {new} besides: add it to PATCH_FIELDS or STATE_FIELDS in nodes/host/compat.py"
    )
    assert set(patcher.model_options) == {"transformer_options"}, "see patches_of in nodes/host/compat.py"
    assert patcher.cached_patcher_init is None, "see remember_loader in nodes/host/compat.py"
    assert len(patcher.get_clone_model_override()) == 2, "see with_weights_of in nodes/host/sampling/split.py"
    for name in ("hook_backup", "load_device", "offload_device", "parent", "patches", "patches_uuid"):
        assert hasattr(patcher, name), f"ComfyUI's ModelPatcher has no {name}; see nodes/host/sampling/split.py"


def test_a_vae_has_what_ours_sets_and_nothing_of_the_pixel_space_is_left(host, checkpoint):
    from fake_cuda import pack

    cpu = torch.device("cpu")
    empty = pack("nodes.host.compat").empty_vae(cpu, torch.float32)
    weights = {name for name, _ in empty.first_stage_model.named_parameters()}
    assert weights == {"pixel_space_vae"}, f"the pixel-space VAE has {weights}: see empty_vae in nodes/host/compat.py"
    ours = pack("nodes.host.loading.vae").load_vae(checkpoint)
    new = vars(ours).keys() - vars(empty).keys()
    assert not new, f"ComfyUI's VAE has no {new} any more; nodes/host/loading/vae.py sets it in vain"
    for name in ("encode_tiled_", "_decode_tiled_owned", "get_sd"):
        assert hasattr(type(empty), name), f"ComfyUI's VAE has no {name} any more; see nodes/host/loading/vae.py"
    for name in ("memory_used_decode", "memory_used_encode", "device", "vae_dtype", "output_device"):
        assert name in vars(empty), f"ComfyUI's VAE has no {name} any more; see nodes/host/loading/vae.py"
    source = inspect.getsource(type(empty))
    for name in ("comfy_has_chunked_io", "decode_output_shape", "output_buffer", "handles_tiling", "disable_offload"):
        assert name in source, f"ComfyUI's VAE reads no {name} any more; nodes/host/loading/vae.py relies on it"


def test_a_load_calls_back_with_what_we_read(host):
    """`load_rest` in nodes/host/loading/weights.py takes these, in this order."""
    import comfy.model_patcher
    from comfy.patcher_extension import CallbacksMP

    cpu, calls = torch.device("cpu"), []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    patcher = comfy.model_patcher.ModelPatcher(model, cpu, cpu)
    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, "test", lambda *arguments: calls.append(arguments))
    patcher.load(cpu, lowvram_model_memory=1, full_load=False)
    assert model.current_weight_patches_uuid == patcher.patches_uuid, "see is_half_unloaded in compat.py"
    assert calls == [(patcher, cpu, 1, False, False)], "ComfyUI's ON_LOAD hands over other things; see weights.py"
    assert model.model_loaded_weight_memory == 0, "ComfyUI counts loaded bytes elsewhere; see weights.py"


def check_model(model):
    """Raise InputError for patches of MODEL that a cluster cannot apply."""
    from fake_cuda import pack

    job = pack("nodes.host.batch.job")
    job.check_patches(model, job.CLUSTER_READER)


def test_an_unknown_kind_of_patch_is_named_and_does_not_go_to_a_cluster(host, checkpoint):
    from comfy.patcher_extension import CallbacksMP
    from fake_cuda import pack

    compat = pack("nodes.host.compat")
    model = pack("nodes.host.loading.load_model").load_model(checkpoint)
    our_kinds = {compat.KEEP, compat.CORE_NODES}
    assert compat.patches_of(model) == our_kinds
    model.frobnications = {}
    assert compat.patches_of(model) == our_kinds
    model.frobnications["a"] = [print]
    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "theirs", print)
    assert compat.patches_of(model) == {*our_kinds, "frobnications", "theirs"}
    with pytest.raises(ValueError, match=r"^model: got a patch that a cluster cannot apply \(frobnications, theirs\)"):
        check_model(model)


def test_patches_of_other_weights_than_the_transformer_s_do_not_go_to_a_cluster(host, checkpoint):
    from fake_cuda import pack

    model = pack("nodes.host.loading.load_model").load_model(checkpoint)
    check_model(model)
    model.patches["model_sampling.sigmas"] = [(1.0, None, 1.0, None, None)]
    with pytest.raises(ValueError, match=r"cluster cannot apply \(model_sampling.sigmas\); remove it"):
        check_model(model)
