"""The network against torch.nn's layers, values computed by hand from the paper's formulas, and its own contract."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from model.attention import CrossAttention, SelfAttention, attention
from model.attention_maps import attention_maps
from model.dropout import Dropout
from model.layers import DecoderLayer, EncoderLayer
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, SinusoidalPositions, Transformer, sinusoidal_table

TINY = NetworkSettings(num_layers=2, d_model=16, d_ff=24, num_heads=4, dropout=0.0)


def network(settings: NetworkSettings = TINY, vocabulary_size: int = 30) -> Transformer:
    torch.manual_seed(3)
    return Transformer(vocabulary_size, settings).double().eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(4, 30, shape, generator=torch.Generator().manual_seed(5))


def embedded(net: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return net.embed(tokens, net.positions(0, tokens.size(1)))


def copy_attention(own: SelfAttention | CrossAttention, theirs: nn.MultiheadAttention) -> None:
    if isinstance(own, SelfAttention):
        weight, bias = own.query_key_value.weight, own.query_key_value.bias
    else:
        weight = torch.cat([own.query.weight, own.key_value.weight])
        bias = torch.cat([own.query.bias, own.key_value.bias])
    theirs.in_proj_weight.data.copy_(weight.data)
    theirs.in_proj_bias.data.copy_(bias.data)
    theirs.out_proj.weight.data.copy_(own.output.weight.data)
    theirs.out_proj.bias.data.copy_(own.output.bias.data)


def copy_layer(
    own: EncoderLayer | DecoderLayer, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
) -> None:
    copy_attention(own.self_attention, theirs.self_attn)
    norms = [own.self_attention_residual.norm]
    if isinstance(own, DecoderLayer):
        copy_attention(own.cross_attention, theirs.multihead_attn)
        norms.append(own.cross_attention_residual.norm)
    norms.append(own.feed_forward_residual.norm)
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    theirs.linear1.load_state_dict(own.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(own.feed_forward.outer.state_dict())


def randomise(module: nn.Module) -> None:
    """Set biases and norms too. With their initial values, an implementation without them would pass."""
    generator = torch.Generator().manual_seed(11)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(
    ("given", "encoder", "decoder", "dropout"),
    [
        ({"num_layers": 2}, 2, 2, 0.4),
        ({"num_layers": 3, "num_decoder_layers": 1, "attention_dropout": 0.3, "activation_dropout": 0.2}, 3, 1, 0.4),
        ({"num_layers": 3, "num_encoder_layers": 1}, 1, 3, 0.0),
    ],
)
def test_stacks_equal_torchs_of_their_depths(
    given: dict[str, Any], encoder: int, decoder: int, dropout: float, pre_norm: bool
) -> None:
    """In training with dropout from the same seed, and position by position from the cache."""
    own = network(NetworkSettings(d_model=16, d_ff=24, num_heads=4, dropout=dropout, pre_norm=pre_norm, **given))
    own.train()
    randomise(own)
    shape = {"dropout": 0.0, "batch_first": True, "norm_first": pre_norm, "dtype": torch.float64}
    norms = [nn.LayerNorm(16, dtype=torch.float64) if pre_norm else None for _ in range(2)]
    encoders = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 24, **shape), encoder, norms[0], enable_nested_tensor=False
    )
    decoders = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, **shape), decoder, norms[1])
    for mine, theirs in zip([*own.encoder, *own.decoder], [*encoders.layers, *decoders.layers], strict=True):
        copy_layer(mine, theirs)
        theirs.dropout1, theirs.dropout2 = Dropout(dropout), Dropout(dropout)  # on each sub-layer's output: section 5.4
        theirs.dropout = Dropout(own.settings.activation_dropout)
        theirs.self_attn.dropout = own.settings.attention_dropout
        if isinstance(mine, DecoderLayer):
            theirs.dropout3, theirs.multihead_attn.dropout = Dropout(dropout), own.settings.attention_dropout
    for norm, stack in ((own.encoder_norm, encoders), (own.decoder_norm, decoders)):
        if stack.norm is not None:
            stack.norm.load_state_dict(norm.state_dict())
    source, target = ids(3, 7), ids(3, 5)
    allowed = torch.arange(7) < torch.tensor([[7], [4], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    torch.manual_seed(7)
    memory = encoders(embedded(own, source), src_key_padding_mask=~allowed)
    expected = decoders(embedded(own, target), memory, tgt_mask=causal, memory_key_padding_mask=~allowed)
    torch.manual_seed(7)
    padded = PaddedTransformer(own)
    torch.testing.assert_close(padded(source, target, allowed), expected, rtol=0, atol=1e-10)
    own.eval()
    expected = padded(source, target, allowed)
    cache = padded.init_cache(padded.encode(source, allowed), 5)
    assert len(cache) == decoder
    for position in range(5):
        states, _ = padded.step(target[:, position, None], position, position, cache, allowed, None)
        torch.testing.assert_close(states, expected[:, position, None], rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_takes_no_quadratic_memory(causal: bool, dtype: torch.dtype) -> None:
    """PyTorch's fused kernel runs and equals the formula."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 9, 8).to(dtype).requires_grad_() for _ in range(3)]
    mask = torch.ones(1, 9, 9).tril() == 1 if causal else torch.arange(9) < torch.tensor([[[9]], [[5]]])
    bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf).unsqueeze(1)
    found = attention(*tensors, bias.to(dtype))
    assert "ScaledDotProductFlash" in type(found.grad_fn).__name__
    query, key, value = (x.detach().double() for x in tensors)
    expected = (query @ key.transpose(2, 3) / math.sqrt(8) + bias).softmax(-1) @ value
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.03)


def test_positions_by_hand() -> None:
    table = sinusoidal_table(5001, 6)
    for position in (0, 1, 7, 49, 5000):
        for pair in range(3):
            angle = position / 10000 ** (2 * pair / 6)
            assert table[position, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_sinusoidal_positions_go_on() -> None:
    positions = SinusoidalPositions(8, num_positions=4)
    assert not positions.state_dict()  # the table is not saved in checkpoints
    for start in (0, 3, 7):
        torch.testing.assert_close(positions(start, 7), sinusoidal_table(14, 8)[start : start + 7], rtol=0, atol=0)
    # Lightning's moving average pairs the buffers too.
    average = torch.optim.swa_utils.AveragedModel(SinusoidalPositions(8, num_positions=4), use_buffers=True)
    average.update_parameters(positions)


def test_embeddings_and_projection_are_one_tensor() -> None:
    net = network()
    names = [name for name, p in net.named_parameters() if p.shape[0] == 30]
    assert names == ["embedding.weight"]
    states = torch.randn(2, 16, dtype=torch.float64)
    torch.testing.assert_close(net.logits(states), states @ net.embedding.weight.T)
    found = embedded(net, torch.tensor([[7, 8]]))
    by_hand = net.embedding.weight[[7, 8]] * 4.0 + sinusoidal_table(2, 16).double()  # sqrt(16)
    torch.testing.assert_close(found[0], by_hand)


def test_an_output_bias_is_added_to_the_logits_and_to_those_of_the_loss() -> None:
    assert "projection.bias" not in network().state_dict()
    net = network(replace(TINY, output_bias=True))
    weights = [net.embedding.weight, net.state_dict(keep_vars=True)["projection.bias"]]
    nn.init.normal_(weights[1])
    states = torch.randn(3, 5, 16, dtype=torch.float64)
    expected = states @ weights[0].T + weights[1]
    torch.testing.assert_close(net.logits(states), expected)
    of_loss = torch.nn.functional.linear(*net.projection_operands(states))
    torch.testing.assert_close(of_loss, expected)
    found, wanted = (torch.autograd.grad(one.square().sum(), weights) for one in (of_loss, expected))
    torch.testing.assert_close(found, wanted)


def test_dropout_is_on_the_sums_of_embeddings_and_positions() -> None:
    net = network(replace(TINY, dropout=0.4))
    sums = embedded(net, torch.tensor([[7, 8, 9]]))
    torch.manual_seed(7)
    expected = Dropout(0.4)(sums)
    torch.manual_seed(7)
    torch.testing.assert_close(embedded(net.train(), torch.tensor([[7, 8, 9]])), expected)
    assert (expected == 0).any()


def test_initial_weights() -> None:
    """Each projection has Xavier's uniform distribution, embeddings have deviation d_model^-0.5, biases are zero."""
    torch.manual_seed(3)
    settings = NetworkSettings(num_layers=1, d_model=256, d_ff=512, num_heads=4, d_k=16, learned_positions=True)
    net = Transformer(2000, settings)
    keys, values = 4 * 16, 4 * 64
    encoder, decoder = net.encoder[0], net.decoder[0]
    cross = decoder.cross_attention
    projections = [cross.query.weight, *cross.key_value.weight.split([keys, values]), cross.output.weight]
    for layer in (encoder.self_attention, decoder.self_attention):
        projections += layer.query_key_value.weight.split([keys, keys, values])
        projections.append(layer.output.weight)
    for layer in (encoder, decoder):
        projections += [layer.feed_forward.inner.weight, layer.feed_forward.outer.weight]
    for weight in projections:
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    for table in (net.embedding.weight, net.positions.table):
        assert table.std().item() == pytest.approx(256**-0.5, rel=0.02)
    norms = [module for module in net.modules() if isinstance(module, nn.LayerNorm)]
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms)
    assert all((bias == 0).all() for name, bias in net.named_parameters() if name.endswith("bias"))
    # All parameters are checked.
    vectors = [parameter for parameter in net.parameters() if parameter.dim() == 1]
    num_parameters = sum(one.numel() for one in [*projections, *vectors, net.embedding.weight, net.positions.table])
    assert num_parameters == sum(parameter.numel() for parameter in net.parameters())


def test_attention_maps_are_what_the_network_attends_to() -> None:
    net = network()
    source, target = ids(2, 5), ids(2, 3)
    maps = attention_maps(net, source, target)
    assert {kind: (len(layers), *layers[0].shape) for kind, layers in maps.items()} == {
        "encoder": (2, 2, 4, 5, 5),
        "decoder": (2, 2, 4, 3, 3),
        "cross": (2, 2, 4, 3, 5),
    }
    for layers in maps.values():
        for weights in layers:
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert maps["decoder"][0].triu(1).abs().max() == 0
    # Weights times values, projected, equals the module's output.
    layer = net.encoder[0].self_attention
    x = embedded(net, source)
    _, _, value = layer.project(x)
    by_maps = layer.output((maps["encoder"][0] @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, None), by_maps)
    # Later passes are not recorded, and no autograd graph is kept.
    PaddedTransformer(net)(source, target)
    assert all(len(layers) == 2 and not layers[0].requires_grad for layers in maps.values())


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    dropout, x = Dropout(0.3), torch.ones(1001, 333)
    y = dropout(x)
    assert (y == 0).double().mean().item() == pytest.approx(0.3, abs=0.005)
    assert y.double().mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(dropout(x), y)
    assert dropout.eval()(x) is x
    assert Dropout(0.0)(x) is x
    # One element in 32,768 is dropped or kept; a probability that rounds to 1 gives no infinity.
    for probability in (2**-15, 1.0 - 1e-7):
        found = Dropout(probability)(torch.ones(2**22))
        assert found.isfinite().all()
        num_rare = int(((found == 0) == (probability < 0.5)).sum())
        assert 90 < num_rare < 170  # 128 are expected, with a standard deviation of 11


def test_padded_ids_give_logits() -> None:
    """Teacher forcing: each sentence alone gives the same, and a token changes no logits before it."""
    net = network()
    source, target = ids(3, 6), ids(3, 5)
    source[1, 4:] = target[1, 3:] = 0
    logits = net(source, target)
    assert list(logits.shape) == [3, 5, 30]
    alone = net(source[1:2, :4], target[1:2, :3])
    torch.testing.assert_close(logits[1:2, :3], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(net(source, target[:, :2]), logits[:, :2], rtol=0, atol=1e-12)
    torch.testing.assert_close(net(source.where(source != 0, 1), target, pad_id=1), logits, rtol=0, atol=1e-12)
