"""Number of floating-point operations of a training step."""

import numpy as np
from numpy.typing import NDArray

from model.settings import NetworkSettings


def training_flops(
    network: NetworkSettings, vocabulary_size: int, source: NDArray[np.integer], target: NDArray[np.integer]
) -> float:
    """Return the FLOPs of the matrix products for sentence pairs, forward and backward, without padding.

    A product of [a, b] and [b, c] counts 2abc. With s and t the lengths of a pair, D d_model, F d_ff, K and V the total
    sizes of all heads' keys and values, N encoder layers, M decoder layers and P pieces, the forward pass of a pair
    needs

        N s (2 D (2K + V) + 2 V D + 4 D F) + N 2 s s (K + V)                      encoder
        M t (2 D (2K + V) + 2 V D + 4 D F) + M 2 t t (K + V)                      decoder
        M t (2 D K + 2 V D) + M s 2 D (K + V) + M 2 t s (K + V)                   cross-attention
        t 2 D P                                                                   output projection

    and the backward pass needs twice that, because each product has two factors. Causal attention counts as a full
    square. Embeddings (looked up, not multiplied), softmax, norms, dropout and additions are not counted.

    Args:
        network: the network's settings.
        vocabulary_size: number of pieces.
        source: source lengths [pairs].
        target: target lengths [pairs].
    """
    s, t = source.astype(np.float64), target.astype(np.float64)
    width, inner = network.d_model, network.d_ff
    keys, values = network.num_heads * network.key_size, network.num_heads * network.value_size
    attention_and_feed_forward = 2 * width * (2 * keys + values) + 2 * values * width + 4 * width * inner
    encoder = s * attention_and_feed_forward + 2 * s * s * (keys + values)
    decoder = t * attention_and_feed_forward + 2 * t * t * (keys + values)
    cross = t * (2 * width * keys + 2 * values * width) + s * 2 * width * (keys + values) + 2 * t * s * (keys + values)
    layers = network.encoder_layers * encoder + network.decoder_layers * (decoder + cross)
    return 3.0 * float((layers + t * 2 * width * vocabulary_size).sum())
