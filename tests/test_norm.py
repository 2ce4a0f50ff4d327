"""Activated batch normalisation: its formula, its in-place twin,
its synchronised form on two real processes.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import nn
from torch.nn import functional as F

from models import synchronised
from models.norm import ABN, EPS, LEAKY_SLOPE, NORMS, add_and_activate, make_norm

ACTIVATIONS = ("leaky_relu", "identity")


def signed_norm(kind="abn", activation="leaky_relu", channels=3, dtype=torch.float64):
    """A norm with weights of both signs and running statistics that are not the initial ones."""
    generator = torch.Generator().manual_seed(1)
    norm = make_norm(kind)(channels, activation).to(dtype)
    state = {name: torch.randn(channels, generator=generator, dtype=dtype) for name in norm.state_dict()}
    state["running_var"] = state["running_var"].abs() + 0.5
    norm.load_state_dict(state)
    return norm


def images(num=4, channels=3, dtype=torch.float64, offset=0.0):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num, channels, 5, 4, generator=generator, dtype=dtype) + offset


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
def test_formula_and_running_statistics(activation, training):
    norm = signed_norm(activation=activation).train(training)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = images()
    mean, var = (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False))
    if not training:
        mean, var = before["running_mean"], before["running_var"]
    column = (1, 3, 1, 1)
    expected = (x - mean.view(column)) / (var.view(column) + EPS).sqrt()
    expected = expected * (before["weight"].abs() + EPS).view(column) + before["bias"].view(column)
    if activation == "leaky_relu":
        expected = torch.where(expected < 0, LEAKY_SLOPE * expected, expected)
    torch.testing.assert_close(norm(x), expected)

    if training:
        before["running_mean"] = 0.9 * before["running_mean"] + 0.1 * mean
        before["running_var"] = 0.9 * before["running_var"] + 0.1 * x.var((0, 2, 3), unbiased=True)
    torch.testing.assert_close(dict(norm.state_dict()), before)


@pytest.mark.parametrize("kind", NORMS)
def test_state_has_four_tensors(kind):
    if kind == "iabn":
        pytest.importorskip("inplace_abn", exc_type=ImportError)
    assert list(make_norm(kind)(3).state_dict()) == ["weight", "bias", "running_mean", "running_var"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
def test_twice_differentiable(activation, training):
    norm = signed_norm(activation=activation).train(training)
    x = images(2)[:, :, :2, :2].clone().requires_grad_()

    def run(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    weight, bias = norm.weight.detach().requires_grad_(), norm.bias.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("lean", [kind for kind in NORMS if kind != "abn"])
def test_lean_forms_equal_the_plain_one(lean, activation, training, memory_format):
    if lean == "iabn":
        pytest.importorskip("inplace_abn", exc_type=ImportError)
    results = []
    for kind in ("abn", lean):
        norm = signed_norm(kind, activation, dtype=torch.float32).train(training)
        x = images(dtype=torch.float32).contiguous(memory_format=memory_format).requires_grad_()
        out = norm(x.clone())  # iabn overwrites what it is given
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, x.grad, norm.weight.grad, norm.bias.grad, dict(norm.state_dict())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_the_end_of_a_residual_block(kind, training):
    if kind == "iabn":
        pytest.importorskip("inplace_abn", exc_type=ImportError)
    plain = signed_norm("abn", "identity", dtype=torch.float32).train(training)
    norm = signed_norm(kind, "identity", dtype=torch.float32).train(training)
    results = []
    for form in (
        lambda x, r: F.leaky_relu(plain(x) + r, LEAKY_SLOPE),
        lambda x, r: add_and_activate(norm, x, r),
    ):
        x = images(dtype=torch.float32).requires_grad_()
        residual = images(dtype=torch.float32, offset=0.3).flip(0).requires_grad_()
        out = form(x.clone(), residual)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, x.grad, residual.grad])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(plain, name).grad, getattr(norm, name).grad, rtol=1e-4, atol=1e-4)


def maps_kept(group=None, kind="abn", dtype=torch.float32):
    """For the backward pass of a norm between two convolutions, the second of which keeps its input;
    in maps of the dtype.
    """
    network = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), make_norm(kind, group)(8), nn.Conv2d(8, 8, 1, bias=False)
    )
    storages = {}

    def keep(tensor):
        if tensor.shape == (2, 8, 16, 16):
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        network(torch.randn(2, 3, 16, 16))
    return sum(tensor.nbytes for tensor in storages.values()) / (2 * 8 * 16 * 16 * dtype.itemsize)


def test_lean_norm_keeps_one_map_where_the_plain_one_keeps_two():
    assert {kind: maps_kept(kind=kind) for kind in ("abn", "abn_lean")} == {"abn": 2, "abn_lean": 1}


def test_lean_norm_does_not_synchronise(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match=r"model\.sync=false"):
        make_norm("abn_lean", object())


def test_without_inplace_abn_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "inplace_abn", None)
    with pytest.raises(ValueError, match=r"pip install .*inplace-abn==1\.1\.0.*model\.norm=abn"):
        make_norm("iabn")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="abn, abn_lean, iabn"):
        make_norm("bn")
    with pytest.raises(ValueError, match="leaky_relu, identity"):
        ABN(3, "relu")


# ---- two processes -----------------------------------------------------------------------------------------

# (images per rank, dtype, offset of the values)
CASES = {
    "equal": ((4, 4), torch.float64, 0.0),
    "unequal": ((6, 2), torch.float64, 0.0),
    "one alone": ((1, 7), torch.float64, 0.0),
    "one empty": ((0, 8), torch.float64, 0.0),
    "far from zero": ((5, 3), torch.float32, 1000.0),
}


def observe(norm, x, weights):
    """Everything a training iteration and a flatness measurement read from the norm,
    for one loss per rank.
    """
    x = x.clone().requires_grad_()
    parameters = [x, norm.weight, norm.bias]
    out = norm(x)
    loss = (out.square() * weights).sum()
    first = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(gradients[0].pow(3).sum(), parameters[:2])
    return {
        "per rank": [out.detach(), first[0], gradients[0].detach(), second[0]],
        "summed": [*first[1:], gradients[1].detach(), gradients[2].detach(), second[1]],
        "shared": [norm.running_mean, norm.running_var],
    }


def loss_weights(x):
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)


def kept_by_precision():
    return [maps_kept(dist.group.WORLD, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]


def observe_cases(rank):
    results = {}
    for name, (sizes, dtype, offset) in CASES.items():
        x = images(sum(sizes), dtype=dtype, offset=offset)
        norm = signed_norm(dtype=dtype)
        norm.group = dist.group.WORLD
        results[name] = observe(norm, x.split(sizes)[rank], loss_weights(x).split(sizes)[rank])
    return results


def cuda_kernels_on_the_cpu():
    """The five operators of PyTorch's SyncBatchNorm, which exist for GPUs only, in eager operations."""
    column, dims = (1, -1, 1, 1), (0, 2, 3)
    library = torch.library.Library("aten", "IMPL", "CPU")

    def stats(x, eps):
        var, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
        return mean, (var + eps).rsqrt()

    def gather(x, means, inverse_stds, running_mean, running_var, momentum, eps, counts):
        count, weights = counts.sum(), counts[:, None]
        mean = (means * weights).sum(0) / count
        squares = (inverse_stds**-2 - eps + (means - mean).square()) * weights
        var = squares.sum(0) / count
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(squares.sum(0) / (count - 1), momentum)
        return mean, (var + eps).rsqrt()

    def elemt(x, weight, bias, mean, inverse_std, eps):
        scaled = (x - mean.view(column)) * (weight * inverse_std).view(column)
        return (scaled + bias.view(column)).to(x.dtype)

    def reduce(grad, x, mean, inverse_std, weight, *wanted):
        with_centred = (grad * (x - mean.view(column))).sum(dims)
        return grad.sum(dims), with_centred, with_centred * inverse_std, grad.sum(dims)

    def backward_elemt(grad, x, mean, inverse_std, weight, sum_dy, sum_dy_xmu, counts):
        mean_dy, slope = sum_dy / counts.sum(), sum_dy_xmu / counts.sum() * inverse_std**2
        centred = x - mean.view(column)
        return (grad - mean_dy.view(column) - centred * slope.view(column)) * (weight * inverse_std).view(
            column
        )

    library.impl("batch_norm_stats", stats)
    library.impl("batch_norm_gather_stats_with_counts", gather)
    library.impl("batch_norm_elemt", elemt)
    library.impl("batch_norm_backward_reduce", reduce)
    library.impl("batch_norm_backward_elemt", backward_elemt)
    return library


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {"kept": [kept_by_precision()], "eager": observe_cases(rank)}
    library = cuda_kernels_on_the_cpu()
    synchronised.FUNCTIONS["cpu"] = synchronised.FUNCTIONS["cuda"]
    results["torch"] = observe_cases(rank)
    results["kept"].append(kept_by_precision())
    del library
    results["synchronised"] = make_norm("abn", dist.group.WORLD)(3).group is not None
    try:
        make_norm("iabn", dist.group.WORLD)
    except ValueError as error:
        results["iabn"] = str(error)
    alone = [dist.new_group([rank]) for rank in range(2)]
    results["alone"] = make_norm("abn", alone[rank])(3).group is None
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, (str(folder),))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", ["eager", "torch"])
def test_two_ranks_equal_one_process(two_ranks, function, case):
    sizes, dtype, offset = CASES[case]
    x = images(sum(sizes), dtype=dtype, offset=offset).double()
    whole = observe(signed_norm(dtype=dtype).double(), x, loss_weights(x.to(dtype)).double())
    ranks = [results[function][case] for results in two_ranks]
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 5e-3, "atol": 5e-3}

    def close(actual, expected):
        torch.testing.assert_close(actual.double(), expected, **tolerance)

    for index, expected in enumerate(whole["per rank"]):
        close(torch.cat([rank["per rank"][index] for rank in ranks]), expected)
    for index, expected in enumerate(whole["summed"]):
        close(sum(rank["summed"][index] for rank in ranks), expected)
    for index, expected in enumerate(whole["shared"]):
        for rank in ranks:
            close(rank["shared"][index], expected)


@pytest.mark.slow
def test_a_synchronised_norm_keeps_one_map_beside_that_of_the_next_convolution(two_ranks):
    assert [results["kept"] for results in two_ranks] == 2 * [[[2, 2], [2, 2]]]


@pytest.mark.slow
def test_who_synchronises(two_ranks):
    for results in two_ranks:
        assert results["synchronised"] and results["alone"]
        if "inplace-abn" not in results["iabn"]:  # the package is there
            assert "model.norm=abn" in results["iabn"] and "model.sync=false" in results["iabn"]


def test_separate_batches_would_not_pass():
    """The two-rank comparison can fail: statistics per half differ from those of the whole."""
    x = images(8)
    halves = torch.cat([signed_norm()(half) for half in x.split(4)])
    assert not torch.allclose(halves, signed_norm()(x))
