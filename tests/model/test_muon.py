"""Muon against PyTorch's, and what it does with joint projections, skipped steps and a saved state."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from model.beyond import muon
from model.beyond.muon import orthogonalize
from model.optimization import build_optimizer
from model.settings import NetworkSettings, TrainingSettings
from model.torch_private import set_gradient_scaling, skips_non_finite_steps
from model.transformer import Transformer

SETTINGS = TrainingSettings(optimizer="muon", muon_momentum=0.8, weight_decay=0.1, adam_beta2=0.9, adam_epsilon=1e-3)
RATES = (0.3, 0.1, 0.2, 0.4)
Gradients = list[list[Tensor]]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def projections(*matrices: nn.Parameter) -> None:
    """Mark each matrix as one projection."""
    for matrix in matrices:
        vars(matrix)["projections"] = (matrix.size(0),)


def gradients_of(parameters: list[nn.Parameter]) -> Gradients:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters] for _ in RATES]


def take_steps(
    optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Gradients, steps: range = range(len(RATES))
) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        for parameter, gradient in zip(parameters, gradients[step], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_steps_are_those_of_pytorchs_muon_and_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where PyTorch's computes in it too; matrices of equal shapes are orthogonalized together.

    As there, a parameter without a gradient stays.
    """
    shapes = [(6, 10), (10, 6), (6, 10), (8, 8), (30, 8), (8,)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    [unused] = parameters((6, 10))
    before = unused.detach().clone()
    projections(unused, *ours[:4])
    gradients = gradients_of(ours)
    take_steps(build_optimizer([unused, *ours], SETTINGS), ours, gradients)
    assert torch.equal(unused, before)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    reference = torch.optim.Muon(theirs[:4], momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    take_steps(reference, theirs[:4], [step[:4] for step in gradients])
    rest = {"betas": (0.9, 0.9), "eps": 1e-3}
    for index, decay in ((4, 0.1), (5, 0.0)):
        adam = torch.optim.AdamW([theirs[index]], weight_decay=decay, **rest)
        take_steps(adam, [theirs[index]], [[step[index]] for step in gradients])
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)])
def test_singular_values_become_about_one(
    shape: tuple[int, ...], has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The singular vectors stay; each matrix has a scale of its own."""
    monkeypatch.setattr(muon, "_has_bfloat16", lambda device: has_bfloat16)
    matrices = (
        torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.tensor([1e-4, 10.0])[:, None, None]
    )
    left, _, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    found = left.mT @ orthogonalize(matrices).double() @ right.mT
    values = found.diagonal(dim1=1, dim2=2)
    assert 0.6 < values.min() < values.max() < 1.3
    assert (found - torch.diag_embed(values)).abs().max() < (0.03 if has_bfloat16 else 1e-5)
    assert not orthogonalize(torch.zeros(1, 4, 6)).any()


def test_each_of_joint_projections_is_orthogonalized_by_itself() -> None:
    joint, *apart = parameters((16, 12), (6, 12), (6, 12), (4, 12), (5, 5))
    vars(joint)["projections"] = (6, 6, 4)
    projections(*apart[:3])
    with torch.no_grad():
        for part, values in zip(apart, joint.split(joint.projections), strict=False):
            part.copy_(values)
    gradients = gradients_of([joint, apart[3]])
    of_parts = [[*step[0].split(joint.projections), step[1]] for step in gradients]
    whole = nn.Parameter(joint.detach().clone())
    projections(whole)
    for trained, given in ((apart, of_parts), ([joint, apart[3]], gradients), ([whole, apart[3]], gradients)):
        take_steps(build_optimizer(trained, SETTINGS), trained, given)
    assert torch.equal(joint, torch.cat(apart[:3]))
    assert (whole - joint).abs().max() > 0.1


def test_which_parameters_are_projections() -> None:
    """All matrices of attention and feed-forward networks; not embeddings, positions, nor what extensions add."""
    settings = NetworkSettings(
        num_layers=1, d_model=8, d_ff=12, num_heads=2, d_k=3, d_v=5, learned_positions=True, output_bias=True
    )
    network = Transformer(20, settings)
    network.encoder[0].extension = nn.Linear(8, 8)
    optimizer = build_optimizer(network.parameters(), SETTINGS)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {names[id(one)]: one.projections for one in optimizer.param_groups[0]["params"]}
    attention, inner = {"query_key_value": (6, 6, 10), "output": (8,)}, {"inner": (12,), "outer": (8,)}
    cross = {"query": (6,), "key_value": (6, 10), "output": (8,)}
    modules = {f"{stack}.0.self_attention": attention for stack in ("encoder", "decoder")}
    modules |= {f"{stack}.0.feed_forward": inner for stack in ("encoder", "decoder")}
    modules["decoder.0.cross_attention"] = cross
    assert found == {f"{path}.{name}.weight": rows for path, parts in modules.items() for name, rows in parts.items()}
    others = [names[id(one)] for group in optimizer.param_groups[1:] for one in group["params"]]
    assert sorted([*found, *others]) == sorted(names.values())
    with pytest.raises(ValueError, match="it finds no projection in this network; choose adam"):
        build_optimizer(nn.Linear(3, 3).parameters(), SETTINGS)


def test_the_step_divides_gradients_by_the_scale_of_the_loss() -> None:
    """tests/integration shows that it skips steps, and that it resumes bit for bit."""
    plain, scaled = (parameters((6, 10), (8, 3), dtype=torch.float32) for _ in range(2))
    projections(plain[0], scaled[0])
    gradients = gradients_of(plain)
    take_steps(build_optimizer(plain, SETTINGS), plain, gradients)
    optimizer = build_optimizer(scaled, SETTINGS)
    assert skips_non_finite_steps(optimizer)
    for step in range(len(RATES)):
        scale = 2.0 ** (10 - step)
        set_gradient_scaling(optimizer, torch.tensor(scale), torch.tensor(0.0))
        take_steps(optimizer, scaled, [[scale * one for one in given] for given in gradients], range(step, step + 1))
    assert torch.equal(parameters_to_vector(plain), parameters_to_vector(scaled))
