"""Write the files of this folder: adapters of other trainers, and the weights with which those trainers compute.

    python tests/adapters/make.py ONETRAINER SD_SCRIPTS SIMPLETUNER

takes checkouts of Nerogar/OneTrainer (23df3832), kohya-ss/sd-scripts (48d368fa) and bghira/SimpleTuner (bc8e6ab7), and
needs the packages lycoris-lora 4.1.3 and parse 1.22.4. The trainers' classes build each adapter, write it, and compute
with it in float64. Empty modules replace the rest of their programs (settings, quantisation). weights.safetensors
contains, by file and layer, every eighth row of the adapter's change to the weight of the bundled model, in float32.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import sana_core  # noqa: E402

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
# square, oblong, a 1x1 convolution; and a depthwise one
LAYERS = ("transformer_blocks.2.attn2.to_q", "proj_out", "patch_embed.proj")
DEPTHWISE = "transformer_blocks.1.ff.conv_depth"
RANK, ALPHA, STEP = 4, 3.0, 8

NUMBERS = torch.Generator().manual_seed(1)
WEIGHTS = {}


class Anything(ModuleType):
    """A module whose every name is there, and does nothing."""

    __path__ = ()

    def __getattr__(self, name):
        return type(name, (), {})


def read_module(root, file, *left_out, **options):
    """The module of a checkout's `file`, those that it names `left_out` being without content but for `given`."""
    for name in left_out:
        sys.modules[name] = Anything(name)
        vars(sys.modules[name]).update(options)
    sys.path.insert(0, root)
    spec = importlib.util.spec_from_file_location(Path(file).stem, Path(root) / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(root)
    return module


def learn(module):
    """Give all parameters of `module` numbers as training might; magnitudes move by a tenth."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "org_module" in name:  # kohya's adapter has the layer in it
                continue
            drawn = torch.randn(parameter.shape, generator=NUMBERS, dtype=torch.float32).to(parameter.dtype)
            size = 0.25 if "lora" in name else 0.5
            parameter.copy_(parameter * (1 + 0.1 * drawn) if "dora_scale" in name else size * drawn)
            # the file has float32
            parameter.copy_(parameter.float())


def computed(layer, plain):
    """The weight of `layer`, computed by applying the layer to unit vectors."""
    weight = plain.weight
    if weight.ndim == 4:
        units = torch.eye(weight.shape[1], dtype=weight.dtype)[..., None, None]
        return (layer(units) - plain.bias[:, None, None]).transpose(0, 1)
    out = layer(torch.eye(weight.shape[1], dtype=weight.dtype))
    return (out if plain.bias is None else out - plain.bias).T


def keep(file, name, changed, before):
    WEIGHTS[f"{file}/{name}"] = (changed - before)[::STEP].float().contiguous()


def written(file, tensors):
    save_file({name: tensor.detach().float().clone() for name, tensor in tensors.items()}, HERE / f"{file}.safetensors")


def base(*layers):
    transformer = sana_core.load_transformer(CHECKPOINT).double().requires_grad_(False)
    return transformer, {name: transformer.get_submodule(name) for name in layers}


def lycoris(file, algorithm, layers=LAYERS, **options):
    """LyCORIS' network, as SimpleTuner has it make and write one. Its merge scales LoHa and LoKr twice, so the weights
    are those that it computes with."""
    import lycoris.config

    transformer, plain = base(*layers)
    before = {name: layer.weight.clone() for name, layer in plain.items()}
    lycoris.config.PRESET["these"] = {"target_module": [], "target_name": list(layers), "enable_conv": True}
    options = {"linear_dim": RANK, "linear_alpha": ALPHA, "algo": algorithm, "preset": "these", **options}
    network = lycoris.create_lycoris(transformer, 1.0, conv_dim=RANK, conv_alpha=ALPHA, **options)
    network.apply_to()
    network.double()
    learn(network)
    network.save_weights(str(HERE / f"{file}.safetensors"), torch.float32, None)
    names = {f"lycoris_{name}".replace(".", "_"): name for name in layers}
    assert {module.lora_name for module in network.loras} == names.keys()
    for module in network.loras:
        name = names[module.lora_name]
        # A convolution of several pixels gives its merged weight instead.
        layer = plain[name]
        keep(file, name, module.get_merged_weight()[0] if name == DEPTHWISE else computed(layer, layer), before[name])


def read_onetrainer(checkout):
    """OneTrainer's classes of adapters, and its conversions of their files, without their other imports."""
    left_out = ("FusedModule", "oft_utils", "quantized", "quantized.LinearSVD")
    utils = ("config", "config.TrainConfig", "enum", "enum.ModelType", "enum.ModelFormat", "ModuleFilter")
    names = [f"modules.module.{name}" for name in left_out] + [f"modules.util.{name}" for name in utils]
    for name in ("modules", "modules.module", "modules.util"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(checkout) / name.replace(".", "/"))]
    sys.modules["modules.util.quantization_util"] = quantisation = ModuleType("quantization_util")
    quantisation.get_unquantized_weight = lambda layer, dtype, device: layer.weight.detach()
    quantisation.get_weight_shape = lambda layer: layer.weight.shape
    makers = read_module(checkout, "modules/module/LoRAModule.py", *names)
    return makers, read_module(checkout, "modules/util/convert_lora_util.py")


def onetrainer(checkout):
    makers, convert = read_onetrainer(checkout)

    def make(file, kind, form, *numbers, **options):
        _, plain = base(*LAYERS)
        tensors = {}
        for name, layer in plain.items():
            adapter = kind(f"transformer.{name}", layer, *numbers, **options).double()
            learn(adapter)
            # DoRAModule makes float32 of a convolution's weight, which is all that the file has anyway
            adapter.orig_forward = layer.forward
            keep(file, name, computed(adapter, layer), layer.weight)
            tensors |= adapter.state_dict(prefix=adapter.prefix)
        written(file, form(tensors))

    def internal(tensors):
        return tensors

    def comfy(tensors):
        tensors = convert.convert_lora_suffix_ab(tensors, peft_convention=False)
        return {name.replace("transformer.", "diffusion_model.", 1): tensor for name, tensor in tensors.items()}

    def flat(tensors):
        return {
            name.replace("transformer_", "lora_unet_", 1): tensor
            for name, tensor in convert.kohya_flatten(tensors).items()
        }

    where = {"train_device": torch.device("cpu")}
    make("onetrainer-lora", makers.LoRAModule, comfy, RANK, ALPHA)
    make("onetrainer-loha", makers.LoHaModule, internal, RANK, ALPHA)
    rows, columns = {"decompose_output_axis": True, **where}, {"decompose_output_axis": False, **where}
    make("onetrainer-dora-rows", makers.DoRAModule, internal, RANK, ALPHA, **rows)
    make("onetrainer-dora-rows-diffusers", makers.DoRAModule, convert.convert_to_diffusers, RANK, ALPHA, **rows)
    make("onetrainer-dora-columns", makers.DoRAModule, flat, RANK, ALPHA, **columns)
    make("onetrainer-dora-columns-diffusers", makers.DoRAModule, convert.convert_to_diffusers, RANK, ALPHA, **columns)
    adapter = {"decompose_both": False, "decompose_factor": 8, "use_tucker": False, "full_matrix": False, **where}
    adapter |= {"weight_decompose": True, "dora_on_output": False}
    make("onetrainer-dokr-columns", makers.LoKrModule, comfy, RANK, ALPHA, **adapter)


def kohya(checkout):
    left_out = ("library", "library.utils", "library.sdxl_original_unet")
    makers = read_module(checkout, "networks/lora.py", *left_out, setup_logging=lambda: None)
    _, plain = base(*LAYERS)
    tensors = {}
    for name, layer in plain.items():
        before = layer.weight.clone()
        adapter = makers.LoRAInfModule(f"lora_unet_{name}".replace(".", "_"), layer, 1.0, RANK, ALPHA).double()
        learn(adapter)
        tensors |= {
            f"{adapter.lora_name}.{part}": tensor for part, tensor in adapter.state_dict().items() if "org_" not in part
        }
        adapter.merge_to(adapter.state_dict(), torch.float64, "cpu")
        keep("kohya-lora", name, layer.weight, before)
    written("kohya-lora", tensors)


def simpletuner(checkout):
    """What SimpleTuner makes, for ComfyUI, of PEFT's adapter; that is trained, and merged, by PEFT."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    names = read_module(checkout, "simpletuner/helpers/training/lora_format.py")
    transformer, plain = base(*LAYERS)
    before = {name: layer.weight.clone() for name, layer in plain.items()}
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LAYERS), init_lora_weights=False)
    model = get_peft_model(transformer, config).double()
    learn(torch.nn.ModuleDict({f"lora {n}": part for n, part in enumerate(adapters_of(model))}))
    tensors = get_peft_model_state_dict(model)
    tensors = {name.replace("base_model.model.", "transformer."): tensor for name, tensor in tensors.items()}
    written("simpletuner-lora", names.convert_diffusers_to_comfyui(tensors, adapter_metadata=config.to_dict()))
    merged = model.merge_and_unload()
    for name in LAYERS:
        keep("simpletuner-lora", name, merged.get_submodule(name).weight, before[name])


def adapters_of(model):
    return [part for name, part in model.named_modules() if name.endswith((".lora_A", ".lora_B"))]


def main():
    torch.manual_seed(0)
    lycoris("lycoris-lora", "lora")
    lycoris("lycoris-lora-rs", "lora", rs_lora=True)
    lycoris("lycoris-lora-tucker", "lora", (*LAYERS, DEPTHWISE), use_tucker=True)
    lycoris("lycoris-loha", "loha")
    lycoris("lycoris-lokr", "lokr", factor=8)
    lycoris("lycoris-lokr-both", "lokr", decompose_both=True, linear_dim=2)
    lycoris("lycoris-lokr-whole", "lokr", factor=8, full_matrix=True)
    lycoris("lycoris-dora", "lora", dora_wd=True)
    lycoris("lycoris-dora-columns", "lora", dora_wd=True, wd_on_output=False)
    lycoris("lycoris-doha", "loha", dora_wd=True)
    lycoris("lycoris-dokr", "lokr", factor=8, dora_wd=True)
    onetrainer(sys.argv[1])
    kohya(sys.argv[2])
    simpletuner(sys.argv[3])
    assert all(change.isfinite().all() and change.any() for change in WEIGHTS.values())
    save_file(WEIGHTS, HERE / "weights.safetensors")


if __name__ == "__main__":
    main()
