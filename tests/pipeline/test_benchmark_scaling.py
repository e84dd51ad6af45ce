"""`benchmark scaling`: its model against numbers worked by hand and against DDP's own buckets, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.__main__ import main
from pipeline.benchmark.scaling_model import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    Cluster,
    Link,
    Prediction,
    Step,
    all_reduce_seconds,
    ddp_buckets,
    exposed_seconds,
    pays_up_to,
    strong_scaling,
    weak_scaling,
)
from pipeline.benchmark.step_terms import GPUS

MB = 10**6
LINK = Link(bytes_per_second=1e9, latency_seconds=0.001)
INFINITE = Cluster(Link(math.inf, 0.0))
STEP = Step(seconds=1.0, backward_seconds=0.4, fixed_seconds=0.2, micro_batches=4)
BUCKETS = [Bucket(10 * MB, 0.25), Bucket(40 * MB, 0.5), Bucket(20 * MB, 1.0)]


def test_all_reduce_by_hand() -> None:
    # Two: a ring sends 100 MB in 2 hops. Four: 150 MB in 6, where a tree would send 200 MB in 4.
    assert all_reduce_seconds(100 * MB, 1, LINK) == 0
    assert all_reduce_seconds(100 * MB, 2, LINK) == pytest.approx(0.100 + 0.002)
    assert all_reduce_seconds(100 * MB, 4, LINK) == pytest.approx(0.150 + 0.006)
    # 512 with little to send: 1 MB up and down a tree of 9 levels beats 1,022 hops.
    assert all_reduce_seconds(MB, 512, LINK) == pytest.approx(0.002 + 0.018)


def test_overlap_by_hand() -> None:
    # Two GPUs without latency: 10, 40 and 20 ms a bucket. Backward of 100 ms: they start at 25, 50 and 100 ms.
    link = LINK._replace(latency_seconds=0.0)
    assert exposed_seconds(BUCKETS, 0.1, 2, link) == pytest.approx(0.020)
    # Of 40 ms: 10-20, 20-60 and, late, 60-80 ms.
    assert exposed_seconds(BUCKETS, 0.04, 2, link) == pytest.approx(0.040)
    assert exposed_seconds(BUCKETS, 0.0, 2, link) == pytest.approx(0.070)


def test_a_shared_batch_by_hand() -> None:
    # Two GPUs: 0.2 + 0.8 / 2 of work; 0.1 s of backward in the last of two micro-batches leaves 20 + 2 ms to wait.
    two = strong_scaling(STEP, BUCKETS, Cluster(LINK), 2)
    assert two == Prediction(2, pytest.approx(0.622), pytest.approx(0.022), pytest.approx(1.0 / (2 * 0.622)))
    # Eight: 0.2 + 0.8 / 8; a tree (2 x bytes, 6 hops) or a ring (1.75 x bytes, 14 hops), whichever is shorter;
    # backward is 50 ms of one part: from 12.5 ms 26 (tree), then 84 (ring), then 46 (tree).
    eight = strong_scaling(STEP, BUCKETS, Cluster(LINK), 8)
    assert eight.exposed_seconds == pytest.approx(0.0125 + 0.026 + 0.084 + 0.046 - 0.05)
    assert eight.step_seconds == pytest.approx(0.3 + eight.exposed_seconds)


def test_a_batch_each_by_hand() -> None:
    # The last of four micro-batches has 100 ms of backward, on any number of GPUs.
    two = weak_scaling(STEP, BUCKETS, Cluster(LINK), 2)
    assert two == Prediction(2, pytest.approx(1.022), pytest.approx(0.022), pytest.approx(1.0 / 1.022))


@pytest.mark.parametrize("scaling", [strong_scaling, weak_scaling])
def test_one_gpu_needs_no_all_reduce(scaling) -> None:
    assert scaling(STEP, BUCKETS, Cluster(LINK), 1) == Prediction(1, 1.0, 0.0, 1.0)


def test_infinite_bandwidth() -> None:
    for gpus in (2, 64, 512):
        assert weak_scaling(STEP, BUCKETS, INFINITE, gpus) == Prediction(gpus, 1.0, 0.0, 1.0)
        shared = strong_scaling(STEP, BUCKETS, INFINITE, gpus)
        assert shared.step_seconds == pytest.approx(0.2 + 0.8 / gpus)
        assert strong_scaling(STEP._replace(fixed_seconds=0.0), BUCKETS, INFINITE, gpus).efficiency == pytest.approx(1)


def test_the_slowest_link_counts() -> None:
    fast = Link(1e11, 0.0)
    cluster = Cluster(LINK, fast, gpus_per_node=8)
    assert [cluster.link(gpus) for gpus in (2, 8, 16)] == [fast, fast, LINK]


def test_where_it_stops_paying() -> None:
    def predictions(*efficiencies: float) -> list[Prediction]:
        return [Prediction(2**power, 1.0, 0.0, efficiency) for power, efficiency in enumerate(efficiencies)]

    assert pays_up_to(predictions(1.0, 0.8, 0.5, 0.49, 0.6)) == 4
    assert pays_up_to(predictions(1.0, 0.9)) == 2
    assert pays_up_to(predictions(1.0, 0.2)) == 1


def test_buckets_are_those_of_ddp() -> None:
    with torch.device("meta"):
        network = Transformer(20_000, NetworkSettings(num_layers=3))
    backwards = list(network.parameters())[::-1]
    sizes = [parameter.numel() * 4 for parameter in backwards]
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(parameter.shape) for parameter in backwards], [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    )
    buckets = ddp_buckets(sizes[::-1])
    assert [bucket.num_bytes for bucket in buckets] == [sum(sizes[i] for i in indices) for indices in theirs]
    assert len(buckets) > 3
    ready = [bucket.ready for bucket in buckets]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0
    assert ready[0] == buckets[0].num_bytes / sum(sizes[:-1])


PREDICTED = ["--trainer.precision", "bf16-mixed", "--batches.max_tokens_per_device", "100"]
LINKS = ["--bandwidth-gb-s", "25", "--latency-us", "5"]


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
def test_measured(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "scaling", "--config", str(recipe_file), "--steps", "3", *LINKS]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    assert figures["measured"]
    assert 0 <= figures["fixed_seconds"] <= figures["step_seconds"]
    assert 0 < figures["backward_seconds"] < figures["step_seconds"]
    assert figures["micro_batches"] == 1
    for way in ("strong", "weak"):
        assert [one["gpus"] for one in figures[way]] == [2**power for power in range(10)]
        assert figures[way][0]["step_seconds"] == figures["step_seconds"]
        assert figures[way][0]["efficiency"] == 1
    assert "efficiency" in printed.err


@pytest.mark.parametrize("gpu", GPUS)
def test_predicted_needs_no_corpus(gpu: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "scaling", "--config", str(recipe_file), "--gpu", gpu, *LINKS, *PREDICTED]
    assert main([*command, "--corpus.folder", "nowhere", "--gpus-per-node", "8", "--node-bandwidth-gb-s", "300"]) == 0
    printed = capsys.readouterr()
    assert f"{GPUS[gpu].name}, ms: products 0.0, " in printed.err
    assert "launches 4.2; MFU 0% of the data sheet" in printed.err
    figures = json.loads(printed.out.splitlines()[-1])
    assert not figures["measured"]
    assert figures["gpu"] == GPUS[gpu].name
    # A tiny network of one layer: the host needs a sixth of 704 x 9 us for each of four micro-batches.
    assert figures["micro_batches"] == 4
    assert figures["host_seconds"] == figures["step_seconds"] == pytest.approx(4 * 0.001056)
    assert sum(figures["term_seconds"].values()) < 0.001
    assert figures["target_tokens_per_second"] == pytest.approx(400 / (4 * 0.001056), rel=1e-4)
    assert 0 < figures["mfu_of_data_sheet_peak"] < 1e-3
    four = figures["strong"][2]
    assert four["step_seconds"] == pytest.approx(0.001056 + four["exposed_seconds"], rel=1e-4)
    with torch.device("meta"):
        network = Transformer(60, NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2))
    assert figures["gradient_bytes"] == sum(4 * parameter.numel() for parameter in network.parameters())


def test_kernels_are_those_of_the_recipe(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "scaling", "--config", str(recipe_file), "--gpu", "h100", *LINKS, *PREDICTED]
    attention = {}
    for kernels in ("null", "triton", "pytorch"):
        assert main([*command, "--run.kernels", kernels]) == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])
        attention[kernels] = figures["term_seconds"]["attention"]
    assert attention["null"] == attention["triton"] < attention["pytorch"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bandwidth-gb-s", "0"], "--bandwidth-gb-s 0.0"),
        (["--latency-us", "-1"], "--latency-us -1.0"),
        (["--gpus-per-node", "8"], "--node-bandwidth-gb-s belong together"),
        (["--step-seconds", "0.1"], "--step-seconds"),
        (["--gpu", "h100"], "trainer.precision 32-true"),
        (["--steps", "0"], "--steps 0"),
        (["--batches.batch_tokens", "60"], "batches.batch_tokens 60"),
    ],
)
def test_mistakes(arguments: list[str], said: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "scaling", "--config", str(recipe_file), *LINKS, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
