"""A model of the training step on many GPUs, computed from one GPU's step and the links between GPUs.

A GPU's own work takes `fixed + (step - fixed) / parts`, where `parts` is the number of GPUs that share the batch, or
the time in which its host launches that work, whichever is longer. Gradients become complete in DDP's buckets, evenly
through the last micro-batch's backward pass; the gradient of the shared embedding is complete only at its end. Buckets
are all-reduced one after another, each as soon as it is complete. The all-reduce time that remains after the backward
pass is exposed: the step waits for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP's defaults: a bucket is closed once it holds this many bytes."""
HOST_BACKWARD_SHARE = 0.5
"""Share of a micro-batch's launches that are in the backward pass; assumed."""


class Step(NamedTuple):
    """An optimizer step on one GPU."""

    seconds: float
    """Duration on the device."""
    backward_seconds: float
    """Backward passes of all micro-batches."""
    fixed_seconds: float
    """Time that does not depend on the batch size: the optimizer, the loop, kernels too short to fill the GPU."""
    micro_batches: int
    host_seconds: float = 0.0
    """Time in which the host launches the work of a micro-batch. A step takes no less."""

    def own_seconds(self, parts: int = 1) -> float:
        """Return the time of one of several GPUs that share the batch, without all-reduces."""
        device = self.fixed_seconds + (self.seconds - self.fixed_seconds) / parts
        return max(device, math.ceil(self.micro_batches / parts) * self.host_seconds)

    def last_backward_seconds(self, parts: int = 1) -> float:
        """Return the time of its last micro-batch's backward pass."""
        device = self.backward_seconds / max(parts, self.micro_batches)
        return max(device, HOST_BACKWARD_SHARE * self.host_seconds)


class Link(NamedTuple):
    """A connection between GPUs."""

    bytes_per_second: float
    """Bandwidth in each direction, of a GPU or of a node whose GPUs are part of one ring."""
    latency_seconds: float
    """Latency from one GPU to the next."""


@dataclass(frozen=True)
class Cluster:
    """The links between GPUs."""

    between: Link
    """Link between nodes, or between all GPUs if `inside` is None."""
    inside: Link | None = None
    """Link between the GPUs of one node."""
    gpus_per_node: int = 1

    def link(self, gpus: int) -> Link:
        """Return the slowest link that this number of GPUs uses."""
        return self.inside if self.inside is not None and gpus <= self.gpus_per_node else self.between


class Bucket(NamedTuple):
    """Gradients that are all-reduced together."""

    num_bytes: int
    ready: float
    """Share of the backward pass after which the gradients are complete."""


class Prediction(NamedTuple):
    """A step on a number of GPUs."""

    gpus: int
    step_seconds: float
    exposed_seconds: float
    """Part of `step_seconds` that waits for gradients."""
    efficiency: float
    """Speed relative to perfect scaling from one GPU."""


def ddp_buckets(parameter_bytes: Sequence[int]) -> list[Bucket]:
    """Group gradients into buckets as DDP does, for a network whose first parameter is the shared embedding.

    Args:
        parameter_bytes: size of each parameter's gradient, in the network's order; the last is complete first.

    Returns:
        Buckets in the order in which they become complete.
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
    """Return the time of a ring or of a tree, whichever is shorter, as NCCL chooses.

    A ring of n GPUs sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops. A double tree sends all bytes twice, up and
    down, in 2 log2(n) hops.
    """
    once = num_bytes / link.bytes_per_second
    ring = 2 * (gpus - 1) / gpus * once + 2 * (gpus - 1) * link.latency_seconds
    tree = 2 * once + 2 * math.ceil(math.log2(gpus)) * link.latency_seconds
    return min(ring, tree)


def exposed_seconds(buckets: Sequence[Bucket], backward_seconds: float, gpus: int, link: Link) -> float:
    """Return the time of all-reduces that remains after the backward pass that they overlap."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * backward_seconds) + all_reduce_seconds(bucket.num_bytes, gpus, link)
    return end - backward_seconds


def strong_scaling(step: Step, buckets: Sequence[Bucket], cluster: Cluster, gpus: int) -> Prediction:
    """Predict the step of GPUs that share one global batch.

    Each GPU gets whole micro-batches while there are enough of them, and parts of one micro-batch otherwise.
    """
    own = step.own_seconds(gpus)
    exposed = exposed_seconds(buckets, step.last_backward_seconds(gpus), gpus, cluster.link(gpus))
    return Prediction(gpus, own + exposed, exposed, step.own_seconds() / (gpus * (own + exposed)))


def weak_scaling(step: Step, buckets: Sequence[Bucket], cluster: Cluster, gpus: int) -> Prediction:
    """Predict the step of GPUs that each have a batch of the measured size."""
    own = step.own_seconds()
    exposed = exposed_seconds(buckets, step.last_backward_seconds(), gpus, cluster.link(gpus))
    return Prediction(gpus, own + exposed, exposed, own / (own + exposed))


def pays_up_to(predictions: Sequence[Prediction]) -> int:
    """Return the largest number of GPUs before efficiency falls below one half."""
    last = 1
    for prediction in predictions:
        if prediction.efficiency < 0.5:
            break
        last = prediction.gpus
    return last
