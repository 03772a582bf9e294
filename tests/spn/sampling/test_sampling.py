"""Sampling: the fast sampler draws what the slow one draws, samples follow the model, seeds and temperature mean what
they say, and nothing that is given is altered.

python -m pytest tests/spn/sampling/test_sampling.py
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spn import sampling
from spn.bitdepth import reduce_depth, split_depth
from spn.decoding import jacobi
from spn.decoding.incremental import Draws
from spn.evaluation import chain_nats
from spn.gpu import folding
from spn.gpu.folding import not_covered
from spn.gpu.training import speed_up
from spn.model import SPN
from spn.ordering import image_to_slices, slices_to_image
from spn.sampling import rows_to_sample, sample_chain, sample_slice_slowly, sample_stage, slice_decoder, uniforms
from tests.spn.whole_images import all_images, context_of, logits_of

UNEVEN = dict(num_layers=3, conv_channels=7, residual_channels=11, num_attn_layers=1, num_attn_heads=3)
NUM_DRAWN = 8_000  # images, where frequencies are compared
DECODERS = {"paper": UNEVEN, "modern": dict(UNEVEN, recipe="modern")}


# ---- the fast sampler is the slow one ------------------------------------------------------------------------------


@torch.no_grad()
def sample_stage_slowly(model: SPN, uniform: Tensor, *, given: Tensor | None = None) -> Tensor:
    """The reference, slice by slice with whole forwards: [B, 3, H, W] (first_slice: one slice)."""
    config = model.config
    numbers = image_to_slices(uniform, config.scaling_factor)
    slices = torch.zeros(numbers.shape, dtype=torch.long)
    for number in range(1 if config.stage == "first_slice" else config.num_slices):
        index = torch.full((len(uniform),), number)
        context = context_of(model, slices_to_image(slices, config.scaling_factor), index, given)
        slices[:, number] = sample_slice_slowly(model, context, Draws(numbers[:, number]))
    return slices[:, 0] if config.stage == "first_slice" else slices_to_image(slices, config.scaling_factor)


@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_same_samples_as_the_slow_sampler_in_float32(small_case, recipe, stage_network, random_values, monkeypatch):
    monkeypatch.setattr(jacobi, "ROWS_AT_ONCE", 2)  # the slices have three or four
    model = stage_network(small_case, seed=8, decoder=DECODERS[recipe]).float()
    config, size = model.config, model.config.image_size
    uniform = uniforms(11, stage=config.stage, images=range(6), image_size=size)
    given = random_values(1, config.num_given_bits, 6, 3, size, size) if config.num_given_bits else None
    slow = sample_stage_slowly(model, uniform, given=given)
    assert len(slow.unique()) > config.num_values // 2  # not a constant
    for decoder in ("plain", "jacobi"):
        assert torch.equal(slow, sample_stage(model, uniform, given=given, decoder=decoder))


@pytest.mark.parametrize(("recipe", "rows"), [("paper", 1), ("modern", 3), ("paper", 4)])
def test_jacobi_iteration_draws_the_same_from_any_guess_in_few_passes_where_the_network_is_certain(
    rows, recipe, tiny_spn, monkeypatch
):
    monkeypatch.setattr(jacobi, "ROWS_AT_ONCE", rows)
    shape = dict(image_size=4, scaling_factor=1, num_bits=2)
    model = tiny_spn("baseline", seed=10, decoder=DECODERS[recipe], **shape)
    uniform = uniforms(3, stage="baseline", images=range(3), image_size=4)
    known = torch.randint(4, (3, 3, 1, 4))

    def passes_of(**options: Any) -> int:
        decode = jacobi.JacobiDecoder(model)
        draws = [
            Draws(uniform, known=known, guess=guess, **options) for guess in (None, torch.ones_like(uniform).long())
        ]
        one, before, other = decode(None, draws[0]), decode.num_passes, decode(None, draws[1])
        assert torch.equal(one, other) and torch.equal(one, sample_slice_slowly(model, None, draws[0]))
        return decode.num_passes - before

    certain, likely, uncertain = passes_of(temperature=1e-9), passes_of(temperature=0.7, top_p=0.8), passes_of()
    fewest = {1: 7, 3: 3, 4: 2}[rows]  # a known row: one pass; others: drawn, then seen to stay
    assert fewest <= min(certain, likely) and max(likely, uncertain) <= uniform[0].numel() + fewest
    with torch.no_grad():
        model = copy.deepcopy(model)
        model.decoder.head.weight.zero_()
    assert passes_of() == fewest  # no value depends on another


# ---- seeds ---------------------------------------------------------------------------------------------------------


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_same_seed_same_images_in_a_batch_or_alone(tiny_chain):
    """An image follows from (seed, its index) alone: batch, order and neighbours do not matter."""
    models = tiny_chain(3, 8)
    whole = sample_chain(models, seed=4, images=range(5))
    assert same(whole, sample_chain(models, seed=4, images=range(5)))
    for number in (0, 3):
        alone = sample_chain(models, seed=4, images=[number])
        assert same(alone, {stage: values[number : number + 1] for stage, values in whole.items()})
    turned = sample_chain(models, seed=4, images=[4, 2, 0])
    assert same(turned, {stage: values[[4, 2, 0]] for stage, values in whole.items()})


def test_sampling_neither_reads_nor_moves_the_global_random_state(tiny_chain):
    models = tiny_chain(1, 3)
    torch.manual_seed(1)
    one, state = sample_chain(models, seed=0, images=[7]), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same(one, sample_chain(models, seed=0, images=[7]))


def test_draws_depend_on_seed_stage_and_index_only():
    base = uniforms(3, stage="size_upscale", images=[8, 5], image_size=4)
    assert base.shape == (2, 3, 4, 4) and base.dtype == torch.float64
    assert torch.equal(base[1], uniforms(3, stage="size_upscale", images=[5], image_size=4)[0])
    for seed, stage, image in [(4, "size_upscale", 5), (3, "first_slice", 5), (3, "size_upscale", 6)]:
        assert not (base[1] == uniforms(seed, stage=stage, images=[image], image_size=4)[0]).any()


def test_no_two_of_many_images_share_their_draws():
    """These two indices have seeds that agree in their last 32 bits, all that torch's CPU generator would look at."""
    draws = uniforms(0, stage="first_slice", images=[95_669, 101_824], image_size=4)
    assert not (draws[0] == draws[1]).any()


# ---- what is given is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [(3, 8), (1, 3, 8), (1, 2, 4, 7), (5,)])
def test_chain_keeps_what_it_is_given(bits, tiny_chain):
    """Shapes and ranges of each stage; the first slice and the high bits pass through bit for bit."""
    models = tiny_chain(*bits)
    known = sample_chain(models, seed=6, images=range(4))
    assert list(known) == list(models)
    assert known["first_slice"].shape == (4, 3, 2, 2)
    assert torch.equal(image_to_slices(known["size_upscale"], 2)[:, 0], known["first_slice"])
    names = [name for name in models if name != "first_slice"]
    for name, depth in zip(names, bits, strict=True):
        assert known[name].shape == (4, 3, 4, 4)
        assert known[name].min() >= 0 and known[name].max() < 2**depth
        assert not known[name].is_floating_point()
    for (lower, few), (upper, more) in itertools.pairwise(zip(names, bits, strict=True)):
        assert torch.equal(reduce_depth(known[upper], from_bits=more, to_bits=few), known[lower])
        low = split_depth(known[upper], num_bits=more - few)[1]
        assert len(low.unique()) > 1


def test_chain_applies_the_temperature_and_top_p_of_each_stage(tiny_chain):
    """A temperature or top_p names its stage: others keep their draws as long as they see the same input."""
    models = tiny_chain(3, 8)
    plain = sample_chain(models, seed=3, images=range(4))
    cold = sample_chain(models, seed=3, images=range(4), temperature={"depth_upscale": 0.05})
    assert torch.equal(plain["size_upscale"], cold["size_upscale"])
    assert not torch.equal(plain["depth_upscale"], cold["depth_upscale"])
    for greedily in ({"temperature": {"first_slice": 1e-6}}, {"top_p": {"first_slice": 1e-6}}):
        greedy = sample_chain(models, seed=3, images=range(4), **greedily)["first_slice"]
        assert not torch.equal(plain["first_slice"], greedy)
        assert (greedy == greedy[:1]).all()  # no chance left: all images start alike


# ---- chains that start from given values ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_known", [1, 2, 3])
def test_first_slices_are_kept_and_the_rest_is_drawn_as_if_they_had_been(num_known, tiny_chain):
    """Slices that a chain drew itself, given back: the same image. Others: kept bit for bit, and they matter."""
    models = {stage: model for stage, model in tiny_chain(3, 8).items() if stage != "first_slice"}
    whole = sample_chain(models, seed=5, images=range(4))
    slices = image_to_slices(whole["size_upscale"], 2)[:, :num_known]
    assert same(sample_chain(models, seed=5, images=range(4), slices=slices), whole)
    other = 7 - slices
    drawn = sample_chain(models, seed=5, images=range(4), slices=other)
    assert torch.equal(image_to_slices(drawn["size_upscale"], 2)[:, :num_known], other)
    assert torch.equal(reduce_depth(drawn["depth_upscale"], from_bits=8, to_bits=3), drawn["size_upscale"])
    rest = [image_to_slices(known["size_upscale"], 2)[:, num_known:] for known in (drawn, whole)]
    assert not torch.equal(*rest)


def test_first_rows_are_kept_and_the_rest_is_drawn_as_if_they_had_been(stage_network, tiny_spn):
    """Depth upscaling over the raster order follows, as it does after any image of its high bits."""
    depth = tiny_spn("depth_upscale", seed=7, image_size=4, scaling_factor=1, num_bits=5, num_given_bits=3)
    models = {"baseline": stage_network("baseline", seed=6), "depth_upscale": depth}
    whole = sample_chain(models, seed=5, images=range(4))
    rows = whole["baseline"][:, :, :2]
    assert same(sample_chain(models, seed=5, images=range(4), rows=rows), whole)
    other = sample_chain(models, seed=5, images=range(4), rows=7 - rows)
    assert torch.equal(other["baseline"][:, :, :2], 7 - rows)
    assert not torch.equal(other["baseline"][:, :, 2:], whole["baseline"][:, :, 2:])
    assert torch.equal(reduce_depth(other["depth_upscale"], from_bits=8, to_bits=3), other["baseline"])


def test_high_bits_are_kept_from_any_depth_of_the_chain(tiny_chain):
    models = tiny_chain(1, 3, 8)
    whole = sample_chain(models, seed=5, images=["a", "b"])
    later = {"depth_upscale_8": models["depth_upscale_8"]}
    again = sample_chain(later, seed=5, images=["a", "b"], image=whole["depth_upscale_3"])
    assert torch.equal(again["depth_upscale_8"], whole["depth_upscale_8"])


def test_what_a_chain_does_not_take_is_refused(tiny_chain):
    """Rather than ignored, as if it had been continued."""
    whole, later = tiny_chain(3, 8), tiny_chain(3, 8, first=None)
    known = sample_chain(whole, seed=5, images=range(2))
    slices, rows = known["first_slice"][:, None], known["size_upscale"][:, :, :1]
    for models, given, why in (
        (whole, {"slices": slices}, "begins with first_slice takes none"),
        (whole, {"image": known["size_upscale"]}, "begins with first_slice takes none"),
        (later, {"rows": rows}, "begins with size_upscale takes slices"),
        (whole, {"temperature": {"depth": 0.5}}, "given for depth; the chain has first_slice"),
        (whole, {"top_p": {"depth": 0.5}}, "given for depth; the chain has first_slice"),
    ):
        with pytest.raises(ValueError, match=why):
            sample_chain(models, seed=5, images=range(2), **given)


def test_frequencies_given_a_first_slice_are_the_exact_conditional(tiny_spn):
    """2 x 2 image of 1 bit, S = 2, two slices given: the 64 outcomes of the others, from the evaluated joint."""
    models = {"size_upscale": tiny_spn("size_upscale", seed=27, image_size=2, scaling_factor=2, num_bits=1)}
    slices = torch.tensor([1, 0, 1, 0, 1, 1]).view(1, 2, 3, 1, 1)
    every = all_images(1, 2, 2)
    agrees = (image_to_slices(every, 2)[:, :2] == slices).flatten(1).all(1)
    log_p = -chain_nats(models, every << 7)["size_upscale"][agrees]
    drawn = sample_chain(models, seed=1, images=range(NUM_DRAWN), slices=slices.expand(NUM_DRAWN, -1, -1, -1, -1))
    counts = number_of(drawn["size_upscale"], 1).bincount(minlength=4096)
    assert counts[~agrees].sum() == 0
    assert_frequencies(counts[agrees], torch.softmax(log_p, 0))


@pytest.mark.parametrize("bits", [(3,), (3, 8), (1, 2, 4)])
@pytest.mark.parametrize(("first", "num_known"), [("first_slice", 0), (None, 0), (None, 3)])
def test_progress_counts_rows(bits, first, num_known, tiny_chain):
    """2 rows in each of 4 slices, a stage, but for slices that are known; a first slice is drawn by either stage."""
    models, calls = tiny_chain(*bits, first=first), []
    slices = torch.zeros((1, num_known, 3, 2, 2), dtype=torch.long) if num_known else None
    sample_chain(models, seed=0, images=[0], slices=slices, on_row=lambda: calls.append(1))
    expected = rows_to_sample([model.config for model in models.values()], num_known_slices=num_known)
    assert len(calls) == expected == 8 * len(bits) - 2 * num_known


# ---- samples follow the model's own probabilities ------------------------------------------------------------------


def number_of(images: Tensor, num_bits: int) -> Tensor:
    """Their places in `all_images`."""
    flat = images.flatten(1)
    return (flat << (num_bits * torch.arange(flat.shape[1]))).sum(1)


def assert_frequencies(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square, rare outcomes pooled; four standard deviations of its distribution are allowed."""
    assert abs(float(probabilities.sum()) - 1) < 1e-9
    expected = probabilities * counts.sum()
    rare = expected < 8
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
    assert probabilities.max() > 1.5 / len(probabilities)  # uniform frequencies would not pass
    uniform_statistic = float(((observed.sum() / len(probabilities) - expected[:-1]) ** 2 / expected[:-1]).sum())
    assert uniform_statistic > freedom + 8 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_of_one_pixel(temperature, tiny_spn):
    """1 x 1 image of 2 bits: 64 outcomes against the product of tempered conditionals, written out here."""
    model = tiny_spn("baseline", seed=21, image_size=1, scaling_factor=1, num_bits=2)
    every = all_images(2, 1, 1)
    with torch.no_grad():
        logits = logits_of(model, every, torch.zeros(len(every), dtype=torch.long))[..., 0, 0]  # [64, 3, V]
    log_p = torch.log_softmax(logits / temperature, -1).gather(2, every[..., 0]).sum((1, 2))
    uniform = torch.rand((NUM_DRAWN, 3, 1, 1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = sample_stage(model, uniform, temperature=temperature)
    assert_frequencies(number_of(drawn, 2).bincount(minlength=64), log_p.exp())


def test_frequencies_of_a_chain_of_sizes(tiny_spn):
    """2 x 2 image of 1 bit, S = 2: all 4,096 outcomes of first_slice and size_upscale against the evaluated chain."""
    common = dict(image_size=2, scaling_factor=2, num_bits=1)
    models = {name: tiny_spn(name, seed=s, **common) for s, name in ((22, "first_slice"), (23, "size_upscale"))}
    every = all_images(1, 2, 2)
    log_p = -sum(chain_nats(models, every << 7).values())
    drawn = sample_chain(models, seed=1, images=range(NUM_DRAWN))["size_upscale"]
    assert_frequencies(number_of(drawn, 1).bincount(minlength=4096), log_p.exp())


def test_frequencies_of_a_chain_of_depths(tiny_spn):
    """1 x 1 image, bits [1, 2, 3]: all 512 outcomes of three stages against the evaluated chain."""
    common = dict(image_size=1, scaling_factor=1)
    models = {
        "baseline": tiny_spn("baseline", seed=24, num_bits=1, **common),
        "depth_upscale_2": tiny_spn("depth_upscale_2", seed=25, num_bits=1, num_given_bits=1, **common),
        "depth_upscale_3": tiny_spn("depth_upscale_3", seed=26, num_bits=1, num_given_bits=2, **common),
    }
    every = all_images(3, 1, 1)
    log_p = -sum(chain_nats(models, every << 5).values())
    drawn = sample_chain(models, seed=2, images=range(NUM_DRAWN))["depth_upscale_3"]
    assert_frequencies(number_of(drawn, 3).bincount(minlength=512), log_p.exp())


def test_images_embedded_a_few_at_once_are_the_same(tiny_chain, monkeypatch):
    models = tiny_chain(1, 3)
    whole = sample_chain(models, seed=4, images=range(5))
    sizes = []
    embedder = models["depth_upscale"].embedder
    embedder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr(sampling, "EMBEDDED_AT_ONCE", 2)
    assert same(sample_chain(models, seed=4, images=range(5)), whole)
    assert sizes == [2, 2, 1] * 4


# ---- which decoder ------------------------------------------------------------------------------------------------


def test_a_cpu_draws_few_images_by_jacobi_iteration(tiny_spn):
    model = tiny_spn("baseline", seed=0, image_size=2, scaling_factor=1)
    for batch, options, is_jacobi in (
        (sampling.FEW, {}, True),
        (sampling.FEW, {"decoder": "plain"}, True),
        (sampling.FEW + 1, {}, False),
        (sampling.FEW + 1, {"decoder": "jacobi"}, True),
        (1, {"coded": True}, False),  # a coder takes one value after the other
    ):
        assert isinstance(slice_decoder(model, batch, **options), jacobi.JacobiDecoder) == is_jacobi


def test_fused_is_refused_where_it_cannot_be_and_other_names_are_unknown(tiny_spn):
    model = tiny_spn("baseline", seed=0, image_size=2, scaling_factor=1)
    with pytest.raises(ValueError, match="decoder is 'fused', but the network is not on a GPU"):
        slice_decoder(model, 1, decoder="fused")
    with pytest.raises(ValueError, match="decoder is 'quick'; it must be one of auto, fused, plain"):
        slice_decoder(model, 1, decoder="quick")


@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_the_fused_kernels_cover_the_networks_of_both_recipes_and_no_changed_one(recipe, tiny_config, monkeypatch):
    def network() -> SPN:
        return SPN(tiny_config("depth_upscale", image_size=4, scaling_factor=2, decoder={"recipe": recipe}))

    class Changed(type(network().decoder)):
        pass

    class ChangedNorm(nn.LayerNorm):
        pass

    for model in (network(), speed_up(network())):
        assert not_covered(model) is None
    changed, part, more = network(), network(), network()
    changed.decoder.__class__ = Changed
    part.decoder.attention.norm = ChangedNorm(8)
    more.decoder.layers[1].skip = nn.Linear(2, 2)
    for model, words in ((changed, "Changed"), (part, "ChangedNorm"), (more, r"layers\.1\.skip\.weight")):
        assert re.search(f"(know|read) the decoder('s)? {words}$", not_covered(model))
    monkeypatch.setattr(folding, "HEEDED", folding.HEEDED - {"num_memory_rows"})  # as if it had come since
    assert not_covered(network()) == "the fused kernels do not know decoder.num_memory_rows"
