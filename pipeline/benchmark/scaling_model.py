"""What a training step costs on many GPUs, on paper: pure functions of one GPU's step and of the links between GPUs.

A GPU's own work takes `fixed + (step - fixed) / parts`, where `parts` is how many GPUs share the batch. Gradients are
complete in DDP's buckets, evenly through the last micro-batch's backward pass; only the shared embedding's is complete
at its very end. Buckets are all-reduced one after another, each as soon as it is complete. What is still under way
when the backward pass ends is exposed: the step waits for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP's own: a bucket is closed once it holds this much."""


class Step(NamedTuple):
    """An optimizer step as one GPU takes it alone."""

    seconds: float
    backward_seconds: float
    """All micro-batches' backward passes together."""
    fixed_seconds: float
    """What does not shrink with the GPU's share of the batch: the optimizer, the loop, kernels too short to fill it."""
    micro_batches: int


class Link(NamedTuple):
    """What an all-reduce goes over."""

    bytes_per_second: float
    """In each direction; of a GPU, or of a node whose GPUs make one ring with the others'."""
    latency_seconds: float
    """From one GPU to the next."""


@dataclass(frozen=True)
class Cluster:
    """The links among GPUs."""

    between: Link
    """Between nodes, or anywhere if nothing is said of nodes."""
    inside: Link | None = None
    """Between the GPUs of one node."""
    gpus_per_node: int = 1

    def link(self, gpus: int) -> Link:
        """The slowest link that so many GPUs need."""
        return self.inside if self.inside is not None and gpus <= self.gpus_per_node else self.between


class Bucket(NamedTuple):
    """Gradients that are all-reduced together."""

    num_bytes: int
    ready: float
    """The share of the backward pass after which they are complete."""


class Prediction(NamedTuple):
    """A step on so many GPUs."""

    gpus: int
    step_seconds: float
    exposed_seconds: float
    """Of these, waiting for gradients."""
    efficiency: float
    """How fast it is over how fast so many GPUs would be if each were as fast as one alone."""


def ddp_buckets(parameter_bytes: Sequence[int]) -> list[Bucket]:
    """The gradients of a network whose first parameter is the shared embedding, as DDP makes buckets of them.

    Args:
        parameter_bytes: of each parameter's gradient, in the network's order; the last is complete first.

    Returns: buckets in the order in which they are complete.
    """
    buckets, held, done = [], 0, 0
    evenly = sum(parameter_bytes[1:])
    for number_left, num_bytes in reversed(list(enumerate(parameter_bytes))):
        held += num_bytes
        done += num_bytes
        if number_left == 0:
            buckets.append(Bucket(held, 1.0))
        elif held >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(Bucket(held, done / evenly))
            held = 0
    return buckets


def all_reduce_seconds(num_bytes: int, gpus: int, link: Link) -> float:
    """A ring's time or a tree's, whichever is shorter, as NCCL chooses.

    A ring sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops; a double tree, up and down, all of them twice in
    2 log2 n.
    """
    once = num_bytes / link.bytes_per_second
    ring = 2 * (gpus - 1) / gpus * once + 2 * (gpus - 1) * link.latency_seconds
    tree = 2 * once + 2 * math.ceil(math.log2(gpus)) * link.latency_seconds
    return min(ring, tree)


def exposed_seconds(buckets: Sequence[Bucket], backward_seconds: float, gpus: int, link: Link) -> float:
    """What of the all-reduces is left when the backward pass that they run beside has ended."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * backward_seconds) + all_reduce_seconds(bucket.num_bytes, gpus, link)
    return end - backward_seconds


def strong_scaling(step: Step, buckets: Sequence[Bucket], cluster: Cluster, gpus: int) -> Prediction:
    """So many GPUs share one global batch: whole micro-batches as long as there are enough, then parts of one."""
    own = step.fixed_seconds + (step.seconds - step.fixed_seconds) / gpus
    last_backward = step.backward_seconds / max(gpus, step.micro_batches)
    exposed = exposed_seconds(buckets, last_backward, gpus, cluster.link(gpus))
    return Prediction(gpus, own + exposed, exposed, step.seconds / (gpus * (own + exposed)))


def weak_scaling(step: Step, buckets: Sequence[Bucket], cluster: Cluster, gpus: int) -> Prediction:
    """Each GPU has a batch of its own, as large as the one that was measured."""
    last_backward = step.backward_seconds / step.micro_batches
    exposed = exposed_seconds(buckets, last_backward, gpus, cluster.link(gpus))
    return Prediction(gpus, step.seconds + exposed, exposed, step.seconds / (step.seconds + exposed))


def pays_up_to(predictions: Sequence[Prediction]) -> int:
    """The last number of GPUs before efficiency falls below a half: beyond, a GPU does less than half its work."""
    last = 1
    for prediction in predictions:
        if prediction.efficiency < 0.5:
            break
        last = prediction.gpus
    return last
