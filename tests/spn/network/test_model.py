"""The networks: what the embedder is given, sizes, refusals, initial weights, and that they learn.

Causality has its own file (test_causality.py), so have the likelihoods (test_likelihood.py).

    python -m pytest tests/spn/network/test_model.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig
from spn.model import SPN, nll_nats, parameter_counts
from spn.ordering import image_to_slices, slices_to_image, slot_offsets
from tests.spn.whole_images import context_of, logits_of, target_of

SHAPE = dict(size_upscale=dict(num_bits=2), depth_upscale=dict(num_bits=2, num_given_bits=3))


# ---- the embedder's input -----------------------------------------------------------------------------------------


def slot_tensor_by_hand(model: SPN, image: Tensor, target: int, given: Tensor | None) -> Tensor:
    """[h, w, channels] for one image [3, H, W], straight from the paper's words (section 3.2)."""
    embedder, size = model.embedder, model.config.scaling_factor

    def embed(part: Tensor, table: Tensor) -> Tensor:  # [3, h, w] -> [h, w, 24]
        tables = table.view(3, -1, 8)
        return torch.cat([tables[colour][part[colour]] for colour in range(3)], dim=-1)

    def cut(whole: Tensor, i: int, j: int) -> Tensor:
        return whole[:, i::size, j::size]

    i, j = divmod(target, size)
    own = cut(image, i, j)
    parts = []
    for di, dj in slot_offsets(size):
        if 0 <= i + di < size and 0 <= j + dj < size:
            parts.append(embed(cut(image, i + di, j + dj), embedder.intensity.table.weight))
        else:
            parts.append(torch.zeros(*own.shape[1:], 24, dtype=torch.float64))
    parts.append(embedder.meta_position.weight[target].expand(*own.shape[1:], 8))
    if given is not None:
        for row in range(size):
            for column in range(size):
                parts.append(embed(cut(given, row, column), embedder.given_intensity.table.weight))
        parts.append(embed(cut(given, i, j), embedder.given_intensity.table.weight))
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("stage", ["size_upscale", "depth_upscale"])
@pytest.mark.parametrize("scaling_factor", [1, 2, 4])
def test_slot_tensor_is_what_the_paper_says(stage, scaling_factor, tiny_spn, random_values):
    """Preceding slices by relative position, zeros for padding, the meta-position tiled over space; for depth
    upscaling all high-bit slices in absolute order and the target's own once more. Every target, mixed in a batch."""
    num_slices, bits = scaling_factor**2, SHAPE[stage]
    model = tiny_spn(stage, seed=0, image_size=2 * scaling_factor, scaling_factor=scaling_factor, **bits)
    index = torch.arange(num_slices).flip(0)
    image = random_values(1, 2, num_slices, 3, 2 * scaling_factor, 2 * scaling_factor)
    given = random_values(2, 3, *image.shape) if stage == "depth_upscale" else None
    with torch.no_grad():
        actual = model.embedder.slots(
            image_to_slices(image, scaling_factor),
            index,
            None if given is None else image_to_slices(given, scaling_factor),
        )
        slots = 2 * scaling_factor * (scaling_factor - 1) + (num_slices + 1) * (given is not None)
        assert actual.shape == (num_slices, 2, 2, 24 * slots + 8)
        for b in range(num_slices):
            expected = slot_tensor_by_hand(model, image[b], int(index[b]), None if given is None else given[b])
            assert torch.equal(actual[b], expected)


def equal_embeddings(model: SPN, slices_at: dict[tuple[int, int], Tensor], targets: list[int]) -> float:
    """Largest difference of s between targets that see the same slices at the same offsets.

    Targets differ in which offsets exist. Value 0 is embedded as zeros, so that a slice of zeros is as empty as padding
    and fills the offsets that only some targets have.
    """
    size = model.config.scaling_factor
    with torch.no_grad():
        model.embedder.intensity.table.weight.view(3, -1, 8)[:, 0] = 0.0
        model.embedder.meta_position.weight[:] = model.embedder.meta_position.weight[0].clone()
        features = []
        for target in targets:
            i, j = divmod(target, size)
            picture = next(iter(slices_at.values()))
            slices = torch.zeros(1, size**2, *picture.shape, dtype=torch.long)
            for (di, dj), content in slices_at.items():
                slices[0, (i + di) * size + j + dj] = content
            features.append(context_of(model, slices_to_image(slices, size), torch.tensor([target]), None))
    assert features[0].std() > 0.1, "a dead embedder is equivariant for nothing"
    return max((f - features[0]).abs().max().item() for f in features)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_embedder_is_equivariant(seed, tiny_spn, random_values):
    """The same preceding slices at the same relative positions give the same s for different targets, with the
    meta-position embedding held fixed (the paper's claim); slices in absolute order would not."""
    offsets = [(-1, -1), (-1, 0), (-1, 1), (0, -1)]  # the neighbours that all of these targets have
    targets = [5, 6, 9, 10, 13, 14]  # S = 4: not in the first row, nor the first or last column
    content = {o: random_values(10 * seed + n, 2, 3, 3, 3) for n, o in enumerate(offsets)}
    model = tiny_spn("size_upscale", seed=seed, image_size=12, scaling_factor=4, num_bits=2)
    assert equal_embeddings(model, content, targets) < 1e-12

    absolute = torch.arange(24).clamp(max=15).expand(16, -1)  # slot k holds slice k for every target
    earlier = absolute < torch.arange(16)[:, None]
    model.embedder.sources = torch.where(earlier, absolute, 16)
    assert equal_embeddings(model, content, targets) > 1e-3


# ---- logits and loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nll_is_the_sum_of_log_probabilities(dtype, random_values):
    """Per image, over R, G, B and all positions; in float32 whatever the logits' type, in float64 if they are."""
    logits = torch.randn(2, 3, 4, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = random_values(1, 2, 2, 3, 2, 5)
    log_p = logits.double().log_softmax(2)
    expected = [
        -sum(log_p[b, c, target[b, c, y, x], y, x].item() for c in range(3) for y in range(2) for x in range(5))
        for b in range(2)
    ]
    actual = nll_nats(logits, target.to(torch.uint8))
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert actual.tolist() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5)


# ---- initial weights and learning ---------------------------------------------------------------------------------

SMALL = dict(  # wide enough that the start is as the initialisation means it
    decoder=dict(num_layers=3, conv_channels=24, residual_channels=48, attn_head_dim=16, num_memory_rows=32),
    embedder=dict(conv_channels=24, residual_channels=32, attn_head_dim=16, num_memory_rows=32),
)


def test_initial_weights_are_tensor2tensors():
    """Glorot uniform for each map (query, key and value are three), biases 0, keys of variance heads / width."""
    torch.manual_seed(0)
    config = SPNConfig(
        stage="baseline",
        image_size=4,
        scaling_factor=1,
        num_bits=3,
        decoder=DecoderConfig(num_layers=2, num_attn_layers=1),
    )
    decoder = SPN(config).decoder
    layer, cell = decoder.attention.layers[0], decoder.layers[1]
    width, heads = 1280, 10
    for weight, fans in (
        *((part, 2 * width) for part in layer.attn.qkv.weight.chunk(3)),
        (layer.attn.out.weight, 2 * width),
        (layer.memory.query.weight, 2 * width),
        (cell.vertical.weight, 2 * 3 * (256 + 512)),
        (cell.down.weight, 1280 + 256),
    ):
        bound = math.sqrt(6 / fans)
        assert weight.abs().max().item() == pytest.approx(bound, rel=1e-2) and weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=1e-2)
    assert layer.memory.keys.std().item() == pytest.approx(math.sqrt(heads / width), rel=1e-2)
    assert layer.memory.values.std().item() == pytest.approx(1, rel=1e-2)
    assert all((p == 0).all() for name, p in decoder.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("stage", ["baseline", "first_slice", "size_upscale", "depth_upscale"])
@pytest.mark.parametrize("num_bits", [3, 5])
def test_an_untrained_network_is_near_uniform(stage, num_bits, tiny_config, random_values):
    """On random images the loss starts within 1 bit of log2(V), and not below it: it cannot know them."""
    size = 1 if stage == "baseline" else 2
    given_bits = 3 if stage == "depth_upscale" else 0
    config = tiny_config(
        stage, image_size=8, scaling_factor=size, num_bits=num_bits, num_given_bits=given_bits, **SMALL
    )
    torch.manual_seed(0)
    model = SPN(config).eval()
    image = random_values(1, num_bits, 32, 3, 8, 8)
    given = random_values(2, given_bits, 32, 3, 8, 8) if given_bits else None
    index = torch.arange(32) % config.num_slices
    with torch.no_grad():
        target = target_of(model, image, index)
        bits = nll_nats(logits_of(model, image, index, given), target).mean().item() / math.log(2) / target[0].numel()
    assert num_bits - 0.05 < bits < num_bits + 1


@pytest.mark.parametrize(
    ("stage", "recipe"),
    [
        ("baseline", "paper"),
        ("first_slice", "paper"),
        ("size_upscale", "paper"),
        ("depth_upscale", "paper"),
        ("size_upscale", "modern"),
    ],
)
def test_overfits_one_batch(stage, recipe, tiny_config, random_values):
    """Random images learned by heart in a few dozen AdamW steps: gradients reach what they must."""
    size = 1 if stage == "baseline" else 2
    given_bits = 2 if stage == "depth_upscale" else 0
    parts = {part: {**sizes, "recipe": recipe} for part, sizes in SMALL.items()}
    config = tiny_config(stage, image_size=4, scaling_factor=size, num_bits=3, num_given_bits=given_bits, **parts)
    torch.manual_seed(0)
    model = SPN(config)
    image = random_values(1, 3, 2, 3, 4, 4).repeat_interleave(config.num_slices, 0)
    given = random_values(2, 2, 2, 3, 4, 4).repeat_interleave(config.num_slices, 0) if given_bits else None
    index = torch.arange(config.num_slices).repeat(2)
    if stage == "first_slice":  # slice (0, 0) only: the others have no earlier slice that would tell the image
        image, index = image[:: config.num_slices], index[:: config.num_slices]
    target = target_of(model, image, index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = nll_nats(logits_of(model, image, index, given), target).mean() / target[0].numel() / math.log(2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # A decoder alone cannot know the first pixel: at best one bit for two images, spread over the dims.
    assert loss.item() < 0.5


def test_dropout_acts_in_training_only(tiny_config, random_values):
    torch.manual_seed(0)
    config = tiny_config(
        "size_upscale",
        image_size=4,
        scaling_factor=2,
        num_bits=2,
        decoder=dict(dropout=0.5),
        embedder=dict(dropout=0.5),
    )
    model = SPN(config)
    image, index = random_values(0, 2, 4, 3, 4, 4), torch.arange(4)
    with torch.no_grad():
        assert not torch.equal(logits_of(model, image, index), logits_of(model, image, index))
        assert not torch.equal(context_of(model, image, index, None), context_of(model, image, index, None))
        model.eval()
        assert torch.equal(logits_of(model, image, index), logits_of(model, image, index))


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 4, 3, 2, 3), (1, 4, 3, 3, 2), (1, 9, 3, 2, 2), (1, 4, 1, 2, 2), (1, 3, 4, 4)])
def test_slices_of_another_shape_are_refused(shape, tiny_spn):
    model = tiny_spn("size_upscale", seed=0, image_size=4, scaling_factor=2)
    with pytest.raises(AssertionError):
        model(torch.zeros(shape, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def test_high_bits_are_given_exactly_to_depth_upscaling(tiny_spn):
    slices, index = torch.zeros(1, 4, 3, 2, 2, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    with pytest.raises(AssertionError, match="high bits"):
        tiny_spn("depth_upscale", seed=0, image_size=4, scaling_factor=2)(slices, index)
    with pytest.raises(AssertionError, match="high bits"):
        tiny_spn("size_upscale", seed=0, image_size=4, scaling_factor=2)(slices, index, slices)


GOOD = SPNConfig(stage="size_upscale", image_size=8, scaling_factor=2, num_bits=3, embedder=EmbedderConfig())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(stage="slice"), ["stage", "'slice'", "first_slice"]),
        (dict(image_size=0), ["image_size", "0"]),
        (dict(scaling_factor=0), ["scaling_factor", "0"]),
        (dict(scaling_factor=3), ["image_size", "8", "scaling_factor 3"]),
        (dict(num_bits=0), ["num_bits", "0"]),
        (dict(num_bits=9), ["9 generated", "8"]),
        (dict(num_given_bits=-1), ["-1 given"]),
        (dict(num_given_bits=6), ["6 given", "3 generated", "8"]),
        (dict(stage="depth_upscale", num_given_bits=3, embedder=None), ["embedder", "None"]),
        (dict(embedder=None), ["embedder", "None", "size_upscale"]),
        (dict(stage="depth_upscale_8"), ["num_given_bits", "0"]),
        (dict(stage="baselines"), ["'baselines'"]),
        (dict(stage="depth_upscale_9", num_given_bits=3), ["'depth_upscale_9'"]),
        (dict(stage="baseline", embedder=None), ["scaling_factor", "2"]),
    ],
)
def test_a_wrong_network_config_names_field_and_value(changes, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(GOOD, **changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind", [DecoderConfig, EmbedderConfig])
def test_wrong_sizes_name_field_and_value(kind):
    names = [f.name for f in dataclasses.fields(kind) if f.name not in ("num_attn_layers", "dropout")]
    for name in names:
        for value in (0, -3):
            with pytest.raises(ValueError, match=f"{name} is {value}"):
                kind(**{name: value})
    for changes in (dict(num_attn_layers=-1), dict(dropout=-0.1), dict(dropout=1.0), dict(dropout=float("nan"))):
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            kind(**changes)
    with pytest.raises(ValueError, match="num_attn_heads 3 \\* attn_head_dim 5.*even"):
        kind(num_attn_heads=3, attn_head_dim=5)
    with pytest.raises(ValueError, match="attn_head_dim is 6; with recipe modern it must be a multiple of 4"):
        kind(attn_head_dim=6, recipe="modern")


# ---- sizes --------------------------------------------------------------------------------------------------------


def test_counts_by_part(tiny_spn):
    """A decoder alone has no embedder's rows; the head's is its weight and bias; parts sum to the total."""
    counts = parameter_counts(tiny_spn("baseline", seed=0, image_size=2, scaling_factor=1, num_bits=3))
    assert {name.split(".")[0] for name in counts} == {"decoder", "total"}
    assert counts["decoder.head"] == (48 + 1) * 3 * 2**3 and counts["decoder.intensity"] == 3 * 8 * 8
    assert counts.pop("total") == sum(counts.values())
