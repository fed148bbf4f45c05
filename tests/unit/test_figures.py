"""The numbers that documents quote are the numbers in `benchmarks/`."""

import json

import pytest
from setup import ROOT

BENCHMARKS = "docs/developer/benchmarks.md"


def read(name):
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def start_figures():
    figures = read("start")
    pack, empty = figures["import"]["pack"], figures["import"]["empty_pack"]
    seconds, demo = figures["server_start"]["seconds"], figures["make_demo"]
    assert figures["runs"] == 5
    yield f"| import of the pack | {pack['seconds']} s | an empty pack: {empty['seconds']} s |"
    yield f"| Python objects after it | {pack['megabytes']} MB | an empty pack: {empty['megabytes']} MB |"
    yield f"| server start until it answers | {seconds['with_pack']} s | without packs: {seconds['without']} s |"
    yield f"{demo['seconds']} s, of which the graph takes {demo['graph_seconds']} s |"


def sampling_figures():
    figures = read("sampling")
    small, large = (figures["loop_beside_pipeline"][f"{pixels} px, 300 tokens"] for pixels in (256, 1024))
    host = figures["ksampler_beside_loop"]["256 px, 300 tokens"]
    runs = f"median of {small['runs']} runs at 256 px, of {large['runs']} runs at 1024 px"
    assert host["runs"] == small["runs"]
    yield f"| sampling | {runs}; ours and the baseline in turn |"
    for name, figure in (
        ("our loop beside diffusers' SanaPipeline, 256 px", small),
        ("the same at 1024 px", large),
        ("KSampler on our MODEL beside our loop, 256 px", host),
    ):
        yield f"| {name} | {figure['ratio']} | {figure['processor_ratio']} |"


def decode_figures():
    def cell(figure):
        return f"{figure['cpu_seconds']:.1f} s, {figure['peak_megabytes']:.0f} MB"

    figures, sizes = read("decode"), read("decode")["sizes"]
    for pixels, of_the_time, of_the_memory in (("512", " of the time", " of the memory"), ("1024", "", "")):
        whole, tiles, strips = (sizes[pixels][name] for name in ("whole", "diffusers_tiles", "strips"))
        time, memory = (strips[name] / whole[name] for name in ("cpu_seconds", "peak_megabytes"))
        yield (
            f"| {pixels} | {cell(whole)} | {cell(tiles)} | {cell(strips)} | {strips['predicted_megabytes']:.0f} MB "
            f"| x{time:.2f}{of_the_time}, x{memory:.2f}{of_the_memory} "
            f"| x{strips['cpu_seconds'] / tiles['cpu_seconds']:.2f}{of_the_time} |"
        )
    tiles, strips = sizes["2048"]["diffusers_tiles"], sizes["2048"]["strips"]
    predicted, time = strips["predicted_megabytes"], strips["cpu_seconds"] / tiles["cpu_seconds"]
    yield f"| 2048 | | {cell(tiles)} | {cell(strips)} | {predicted:.0f} MB | | x{time:.2f} |"
    tiles, strips = (figures["two_threads"]["2048"][name] for name in ("diffusers_tiles", "strips"))
    yield f"take x{strips['cpu_seconds'] / tiles['cpu_seconds']:.2f} of the processor time of the tiles"
    yield f"They took {strips['seconds']:.0f} s where the tiles took {tiles['seconds']:.0f} s"
    lite = read("decode_lite")["sizes"]["512"]["dc-ae-f32c32"]["strips"]
    runs = [lite, sizes["512"]["strips"], sizes["512"]["strips_exact"]]
    assert len({run["plan"] for run in runs}) == 1
    least, middle, most = sorted(run["peak_megabytes"] for run in runs)
    yield f"three runs of one plan took {least:.0f}, {middle:.0f} and {most:.0f} MB"
    yield f"diffusers' tiles differ by {sizes['1024']['diffusers_tiles']['relative_difference']:.2f} of the norm"
    yield f"the difference is at most {strip_difference()} of the norm"


def strip_difference():
    """The largest difference of a decode with the attention in strips from the undivided decode."""
    figures = [figure for methods in read("decode")["sizes"].values() for figure in methods.values()]
    compared = [
        figure for figure in figures if figure["against"] == "whole" and "latent rows" in figure.get("plan", "")
    ]
    assert len(compared) == 3
    return f"{max(figure['relative_difference'] for figure in compared):.1e}".replace("e-0", "e-")


def file_figures():
    streamed, graph, load = read("decode_stream")["sizes"], read("graph_4k"), read("load")
    gigabytes = [streamed[pixels]["measured_megabytes"] / 1000 for pixels in ("4096", "8192")]
    nodes, results = graph["seconds_of_nodes"], load["results"]
    yield f"4096 px: {gigabytes[0]:.1f} GB; 8192 px: {gigabytes[1]:.1f} GB |"
    yield (
        f"{graph['seconds']:.0f} s: sampling {nodes['SanaNodesSampler']:.0f}, decode {nodes['SanaNodesDecode']:.0f} |"
    )
    ours, theirs = results["ours"], results["load_file, read"]
    yield f"| loading | median of {load['runs']} runs |"
    yield f"| inspecting its header | {1000 * results['inspect']['seconds']:.1f} ms | |"
    yield f"{ours['seconds']:.2f} s | `load_file` and one reading: {theirs['seconds']:.2f} s |"
    yield f"| peak memory, of the file's size | {ours['peak_of_file']} | {theirs['peak_of_file']} |"
    yield f"| {results['ours, to fp32']['peak_of_file']}, of which 2 are the result | |"
    yield f"beside reading it into new memory | x{load['times_as_fast']['read to a device']:.1f} |"
    memory = read("memory")
    ratios = [figure["measured_of_predicted"] for part in ("text", "transformer") for figure in memory[part].values()]
    yield f"Measured memory is {min(ratios):.2f} to {max(ratios):.2f} times the prediction"


def training_figures():
    figures, parallel, learned = read("train"), read("train_parallel"), read("train_lora")
    large, small = (
        figures["step"]["0.6B, 6 blocks, 512 px, batch 2"],
        figures["step"]["bundled model, 128 px, batch 32"],
    )
    (epoch,) = figures["epoch"].values()
    ddp, fsdp = (parallel["overhead"][kind]["ratio"] for kind in ("ddp", "fsdp"))
    yield f"| a step beside a bare loop of the same operations, 0.6B with 6 blocks at 512 px | x{large['ratio']} |"
    yield f"batches of 32 at 128 px | x{small['ratio']} |"
    yield f"| an epoch that encodes beside one that reads the cache | x{epoch['uncached_of_cached']:.1f} |"
    yield f"| share of a cached epoch that waits for data | {100 * epoch['reading_share']:.1f} % |"
    yield f"| a step beside a bare loop under the same wrapper: DDP, FSDP | x{ddp:.2f}, x{fsdp:.2f} |"
    before, new, familiar = learned["right_before"], learned["mixed"]["new"], learned["mixed"]["old"]
    yield f"from {learned['paintings']['new']} images of them and {learned['paintings']['old']} images of known things"
    yield f"the subject is right in {100 * new['subject']:.0f} %, the colour in {100 * new['colour']:.0f} %"
    yield f"everything in {100 * new['all']:.0f} % (before: {100 * before['new']['all']:.1f} %)"
    yield f"everything is right in {100 * familiar['all']:.0f} % (before: {100 * before['old']['all']:.0f} %)"
    steps, beside = learned["steps"]["beside"], learned["beside"]
    both = (
        f"{100 * beside['new']['all']:.0f} % of the new scenes and {100 * beside['old']['all']:.0f} % of the known ones"
    )
    yield f"the same {steps} steps end at {both}"


def batch_figures():
    figures, faults, interrupt = read("batch"), read("cluster_faults"), read("interrupt")
    ends, speedup = interrupt["from_interrupt_to_end_s"], {one["pixels"]: one["speedup"] for one in figures["speedup"]}
    yield f"ended within {min(ends)} to {max(ends)} s, two images of 1024 px on two cores with a load of "
    yield f"with a load of {interrupt['load_of_the_machine']} "
    yield f"struck by {sum(faults['faults'].values())} random faults"
    yield f"lost none of {faults['images']} images"
    yield f"the longest wait was {max(faults['longest silence, s'].values()):.0f} s, for a killed process"
    assert max(faults["longest silence, s"], key=faults["longest silence, s"].get) == "kill_actor"
    yield f"| two workers of speeds 3:1, share of the ideal | {figures['unequal']['share_of_ideal']} |"
    yield f"| what the queue adds to chunks of 1 s | {100 * figures['overhead']['overhead']:.2f} % |"
    yield f"256, 128 px | x{speedup[256]:.2f}, x{speedup[128]:.2f} |"
    yield f"| the same at 128 px with two processes of Ray | x{figures['ray_speedup']['speedup']:.2f} |"
    host_bound = read("host_bound")
    sizes = [figure for name, figure in host_bound.items() if name.endswith("blocks")]
    for kind in ("threads", "processes"):
        gains = [next(figure[way] for way in figure if way.startswith(f"2 {kind}"))["median"] for figure in sizes]
        yield f"two {kind} beside one | {', '.join(f'x{gain:.2f}' for gain in gains)} |"
    yield f"GPUs that wait for the host: median of {host_bound['rounds']} rounds |"
    simulated = figures["simulated_scaling"]["1.6B, 1024 px, 1 at once"]
    for kind, name in (("threads", "threads of one process"), ("processes", "the same: a process for each")):
        yield f"{name} | {', '.join(f'x{gain:.2f}' for gain in simulated[kind][1:])} |"
    simulation = figures["simulation"]
    efficiency = simulation["efficiency"]
    yield (
        f"| {simulation['workers']} simulated workers that die, hang and run out of memory, {simulation['pictures']:,} "
        f"images, {simulation['seeds']} seeds: efficiency | worst {efficiency['worst']:.3f}, "
        f"mean {efficiency['mean']:.3f} |"
    )


def split_figures():
    figures = read("split")
    step, decode, counted = figures["times"]["step"], figures["times"]["decode"], figures["counted"]
    largest = max(figure["from_whole"] for figure in figures["differences"].values())
    assert counted["exchanges_in_a_block"] == 2 and largest <= 3e-7 < 2 * largest
    yield f"two exchanges a block, {counted['MB_of_sums_from_a_shard']:.2f} MB of sums from each device"
    yield "at most 3e-7 from the undivided forward"
    yield f"two threads | x{step['two_threads_gain']} |"
    yield f"| the decode of 1024 px by f32c32: two threads | x{decode['two_threads_gain']} |"


FIGURES = [
    start_figures,
    sampling_figures,
    decode_figures,
    file_figures,
    training_figures,
    batch_figures,
    split_figures,
]


def words(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("figures", FIGURES, ids=lambda function: function.__name__)
def test_the_page_of_benchmarks_quotes_the_last_runs(figures):
    page, sentences = words(BENCHMARKS), list(figures())
    assert len(sentences) >= 4 and [text for text in sentences if text not in page] == []


def accelerator_figures():
    """Rows of the table, without the columns whose digits the page chooses."""
    counts = read("accelerator_counts")
    for name, stage, size in (
        ("step, 1.6B, 1024 px", "guided_step", "1.6B, 1024 px"),
        ("step, 1.6B, 4096 px", "guided_step", "1.6B, 4096 px"),
        ("step, 0.6B, 1024 px", "guided_step", "0.6B, 1024 px"),
        ("step, SANA-1.5 4.8B, 1024 px", "guided_step", "1.5-4.8B, 1024 px"),
        ("decode, 1024 px", "decode", "1024 px"),
        ("decode, 4096 px", "decode", "4096 px"),
        ("decode, 8192 px", "decode", "8192 px"),
        ("encode, 4096 px", "encode", "4096 px"),
        ("decode, 4096 px, DC-AE-Lite", "decode_lite", "4096 px"),
    ):
        row = counts[stage][size]
        yield (name, row["launches"]), (row["gigabytes_moved"], row["peak_megabytes"], row["predicted_megabytes"])


def test_the_table_of_launches_and_bytes_quotes_the_counts():
    page = words("docs/developer/accelerators.md").partition("## Launches, bytes, memory")[2]
    for (name, launches), (moved, peak, predicted) in accelerator_figures():
        row = page.split(f"| {name} | ")[1].split(" |")[:5]
        assert int(row[0].replace(",", "")) == launches, name
        assert abs(float(row[1]) - moved) <= (0.5 if moved > 100 else 0.05), name
        assert abs(float(row[3].removesuffix(" MB")) - peak) <= 0.5, name
        assert abs(float(row[4]) - predicted) <= 0.5, name


def host_figures():
    """Rows of the table of the host's time."""
    models = [read("host_time")[name] for name in ("0.6B, 28 blocks", "1.6B, 20 blocks")]
    replayed = [
        f"x{model['replayed / eager']['time']} ({model['calls']['replayed']} of {model['calls']['eager']} calls)"
        for model in models
    ]
    yield f"| replayed beside eager | {' | '.join(replayed)} |"
    for name, pair, digits in (
        ("eager beside diffusers", "eager / diffusers", 2),
        ("in ComfyUI beside eager", "canvas / eager", 1),
    ):
        cells = [f"x{model[pair]['time']:.{digits}f} (x{model[pair]['calls']:.{digits}f})" for model in models]
        yield f"| {name} | {' | '.join(cells)} |"


def test_the_table_of_the_hosts_time_quotes_the_last_run():
    page, rows = words("docs/developer/accelerators.md"), list(host_figures())
    assert len(rows) == 3 and [row for row in rows if row not in page] == []
    for model in ("0.6B, 28 blocks", "1.6B, 20 blocks"):
        assert max(read("host_time")[model]["replayed / eager"].values()) <= 0.1
    figures = read("train_host")
    ratios = figures["compiled / checkpointing"], figures["compiled / all values kept"]
    sentence = "takes x{:.2f} of the host's time of one with checkpointing, and x{:.2f} of one without"
    assert sentence.format(*ratios) in page
    counts = [figures["launches"][way] for way in ("compiled", "checkpointing", "all values kept")]
    assert "It launches {} operations instead of {} and {}".format(*counts) in page and counts[0] <= 4000


def product_speed(pixels):
    """Tflop/s of the matrix products inside a guided step of 1.6B, from the profile on the H100."""
    width, rows, blocks = 2240, 2 * (pixels // 32) ** 2, 20
    # Query, key and value; three more projections; two 1x1 convolutions of the feed-forward.
    flop = 2 * rows * blocks * width * (3 * width + 3 * width + 5 * width + 2.5 * width)
    kernels = read("gpu/nvidia-h100-80gb-hbm3")["parts"]["step"][f"profile of 1.6B {pixels} px, pack"]["kernels"]
    products = [ms for name, (ms, launches) in kernels.items() if name.startswith("nvjet") and launches >= blocks]
    return 1e-9 * flop / sum(products)


def test_the_speed_of_products_is_the_one_in_the_profile():
    text = f"at {product_speed(1024):.0f} TFLOP/s at 1024 px, and at {product_speed(4096):.0f} at 4096 px"
    assert text in words("docs/developer/accelerators.md")


def other_figures():
    yield "docs/memory.md", f"the difference was at most {strip_difference()} of the norm"
    lost = {name: f"{100 * form['forward']:.1f} %" for name, form in read("quantised")["errors"]["1.6B wide"].items()}
    yield (
        "docs/memory.md",
        f"which changes images least (an error of {lost['int8']}), then *quantise* fp8 ({lost['fp8']})",
    )
    yield "docs/memory.md", f"Avoid *weight_dtype* fp8 ({lost['weight_dtype fp8_e4m3fn']})"
    yield "web/docs/SanaNodesLoader.md", f"({lost['weight_dtype fp8_e4m3fn']} against {lost['int8']})"
    levels = f"{read('pipeline')['largest_levels'] / 255:.1e}".replace("e-0", "e-")
    yield "docs/reference.md", f"Equals diffusers' `SanaPipeline` to {levels} in images from 0 to 1"
    assert max(read("reference")["largest_relative_difference"].values()) <= 1e-6
    yield "docs/reference.md", "within 1e-6 with independent forwards of each codebase"
    memory = read("train_parallel")["memory"]
    ratios = f"{memory['1.6B']['predicted_of_counted']} and {memory['1.5-4.8B']['predicted_of_counted']} times"
    yield BENCHMARKS, f"The fsdp rows are {ratios} what was counted"
    saving = read("train_saving")
    lora, full, waiting = (
        f"{100 * saving[kind][way]['share']:.1g} %"
        for kind, way in (("lora", "behind"), ("full", "behind"), ("full", "at_once"))
    )
    assert (saving["lora"]["behind"]["share"], saving["save_every"]) == (0.0045, 100)
    yield BENCHMARKS, f"where all weights are trained, which would be {waiting} if it waited"
    yield BENCHMARKS, f"and {full} where all weights are trained"
    yield BENCHMARKS, "With a state every 100 steps that is 0.5 % of a LoRA's run on the demo model"
    loss = {
        way: [sizes[f"loss at {pixels}"] for pixels in (256, 384)] for way, sizes in read("train_sizes")["ways"].items()
    }
    yield BENCHMARKS, f"one after the other at {loss['phases'][0]:.3f} and {loss['phases'][1]:.3f}"
    yield BENCHMARKS, f"mixed end at 0.943 and {loss['mixed'][1]:.3f}"
    bytes_of = {name: forward["bytes"] / 1e9 for name, forward in read("video")["forwards"].items()}
    for size in ("480p", "720p"):
        one, both = (f"{bytes_of[f'video-2B-{size}, {count} prompts']:.2g}" for count in (1, 2))
        yield "docs/video.md", f"| {size} | 4.1 | {one} | {both} |"


def test_other_pages_quote_the_last_runs():
    quoted = list(other_figures())
    assert len(quoted) >= 11 and [(page, text) for page, text in quoted if text not in words(page)] == []


def test_the_bundled_recipe_has_its_figure():
    assert "lora_bundled" in read("train_recipes")["recipes"]


def test_the_page_of_memory_quotes_the_decode_of_other_vaes():
    figures = [read("decode_kl")[vae] for vae in ("SD", "FLUX")]
    page = words("docs/memory.md")
    strips, tiles = (max(vae[way]["error"]["largest"] for vae in figures) for way in ("strips", "tiles"))
    assert strips <= 3e-6 and f"was {strips:.0e} of the range, and {tiles:.2f} with tiles".replace("e-0", "e-") in page
    times = [sorted(vae[way]["time"] for vae in figures) for way in ("strips", "tiles")]
    (least, most), (low, high) = times
    assert f"took x{least:.2f} to x{most:.2f} of the time, tiles x{low:.1f} to x{high:.1f}" in page
