"""Networks of timm as backbones: how they are built, trained, resumed, filled with weights, and missed."""

import copy
import sys

import pytest
import torch
from conftest import walk_until
from torch import nn
from torch.nn import functional as F

import train
from configs.schema import ConfigError
from data.transforms import MEAN, STD
from engine import checkpoint
from engine.arguments import read_config
from engine.objective import Placement
from models import build_segmenter
from models.backbone import BACKBONES, Colours, colours_of
from models.pretrained import WeightsError, load_backbone_weights, weights_file
from models.synchronised import SynchronisedBatchNorm
from scripts.benchmarks.counting import count_iteration

SWIN = "timm/swin_tiny_patch4_window7_224"


@pytest.fixture
def timm():
    from data.vision import torchvision

    assert torchvision
    return pytest.importorskip("timm")


@pytest.fixture
def without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)


def segmenter_of(body, output_stride=16, **options):
    torch.manual_seed(0)
    segmenter = build_segmenter(body, output_stride=output_stride, head_channels=4, **options)
    segmenter.add_classes(3)
    return segmenter


# ---- missing -----------------------------------------------------------------------------------------------


def test_without_the_package_the_error_says_how_to_get_it(without_timm, toy_arguments):
    with pytest.raises(
        ConfigError, match=r"model.body: 'timm/resnet18' needs the package timm.*pip install timm"
    ):
        read_config(toy_arguments("model.body=timm/resnet18"))
    assert "resnet101" in BACKBONES and "timm/resnet18" not in BACKBONES


def test_a_checkpoint_of_timm_says_what_it_needs(toy_arguments, tmp_path, monkeypatch, timm):
    model, architecture = segmenter_of("timm/test_vit"), {"body": "timm/test_vit", "head_channels": 4}
    facts = {"step": 0, "class_ids": [0, 1, 2], "class_names": ["background", "a", "b"], "config": ""}
    state = checkpoint.step_state(model, architecture, methods={}, costs={}, **facts)
    checkpoint.save(state, tmp_path / "step_0.pt")
    assert checkpoint.load_segmenter(tmp_path / "step_0.pt")[0].num_classes == 3
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(checkpoint.CheckpointError, match=r"needs the package timm.*pip install timm"):
        checkpoint.load_segmenter(tmp_path / "step_0.pt")
    with pytest.raises(WeightsError, match="needs the package timm"):
        weights_file("timm/test_vit", "imagenet")


def test_an_unknown_network_is_refused_with_a_near_one(timm, toy_arguments):
    with pytest.raises(
        ConfigError, match=r"'timm/resnet51' is no network of timm .*did you mean timm/resnet"
    ):
        read_config(toy_arguments("model.body=timm/resnet51"))


@pytest.mark.parametrize(
    ("name", "match"),
    [("test_maxvit", "takes images of .* pixels only"), ("vit_small_patch14_dinov2", "14 times smaller")],
)
def test_networks_that_cannot_serve_are_refused(timm, name, match):
    with torch.device("meta"), pytest.raises(ValueError, match=match):
        build_segmenter(f"timm/{name}")


# ---- features ----------------------------------------------------------------------------------------------


def test_a_dilated_network_gives_what_timm_gives(timm):
    segmenter = segmenter_of("timm/test_resnet").eval()
    torch.manual_seed(0)
    theirs = timm.create_model("test_resnet", features_only=True, output_stride=16).eval()
    theirs.load_state_dict(segmenter.body.net.state_dict())
    x = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        for ours, expected in zip(segmenter.body.stages(x), theirs(x), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output_stride", [8, 16])
def test_a_coarser_network_is_enlarged_from_whole_cells(timm, output_stride):
    """Swin gives maps of 1/32 with the channels last, whose last one is enlarged."""
    segmenter = segmenter_of(SWIN, output_stride).eval()
    x = torch.randn(1, 3, 70, 40)
    with torch.no_grad():
        last = segmenter.body.net(F.pad(x, (0, 24, 0, 26)))[-1].permute(0, 3, 1, 2)
        size = (96 // output_stride, 64 // output_stride)
        whole = F.interpolate(last, size=size, mode="bilinear")
        features = segmenter.body(x)
    expected = whole[..., : -(-70 // output_stride), : -(-40 // output_stride)]
    torch.testing.assert_close(features, expected)
    assert segmenter(x).logits.shape == (1, 3, 70, 40)


def test_images_are_normalised_as_the_network_wants_them(timm, toy_arguments):
    assert colours_of("timm/test_vit") == Colours((0.5,) * 3, (0.5,) * 3)
    assert colours_of(SWIN) == Colours(MEAN, STD)
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    config = read_config(toy_arguments("model.body=timm/test_vit"))
    placed = Placement.of(config, torch.device("cpu")).images(images)
    torch.testing.assert_close(placed, images.float() / 127.5 - 1, rtol=0, atol=1e-6)
    assert segmenter_of("timm/test_vit").colours == colours_of("timm/test_vit")


def test_work_and_memory_are_counted(timm):
    assert count_iteration("timm/test_vit", 32, 2).peak > 0


# ---- training ----------------------------------------------------------------------------------------------

SMALL = (
    *("data.crop=64", "model.output_stride=16", "method.name=plop", "method.strength=0.01"),
    *("train.epochs=1", "train.epochs_later=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["timm/test_resnet", SWIN])
def test_two_steps_resume_to_the_bit(timm, body, toy_arguments, tmp_path):
    options = (*SMALL, f"model.body={body}", "phase.name=altersgd", "phase.p=0.5")
    walk_until(toy_arguments(*options, name="whole"))
    from test_resume import stop_and_go

    assert stop_and_go(toy_arguments(*options, name="pieces"), 2) > 1
    for step in (0, 1):
        whole, pieces = (checkpoint.load(tmp_path / f"runs/{n}/step_{step}.pt") for n in ("whole", "pieces"))
        assert whole["network"]["arguments"]["body"] == body
        for name, tensor in whole["model"].items():
            assert torch.equal(tensor, pieces["model"][name]), name


def test_a_run_with_a_network_of_timm(timm, toy_arguments, tmp_path):
    short = ("model.body=timm/test_resnet", "train.epochs_later=1", "method.name=mib", "average.name=ewf")
    assert train.main(toy_arguments(*SMALL, *short)) == 0
    model, _ = checkpoint.load_segmenter(tmp_path / "runs/run/step_1.pt")
    counts = [t.item() for key, t in model.state_dict().items() if key.endswith("num_batches_tracked")]
    assert counts and set(counts) == {3}  # two updates in step 0, one in step 1


def exchange(rank, port, state, x, results):
    """Run a batch norm of timm on one of two ranks."""
    from test_distributed import become_rank

    become_rank(rank, 2, port)
    torch.distributed.init_process_group("gloo")
    segmenter = segmenter_of("timm/test_resnet", group=torch.distributed.group.WORLD).double()
    segmenter.load_state_dict(state)
    features = segmenter.train().body(x[rank : rank + 1])
    features.square().sum().backward()
    assert segmenter.teacher() is not None
    results[rank] = (
        features.detach(),
        {key: t.clone() for key, t in segmenter.body.state_dict().items()},
        [p.grad.clone() for p in segmenter.body.parameters()],
    )
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_batch_norms_of_timm_take_their_statistics_over_all_ranks(timm):
    from test_distributed import free_port

    segmenter = segmenter_of("timm/test_resnet").double()
    for norm in segmenter.norms():
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    state, x = copy.deepcopy(segmenter.state_dict()), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(exchange, (free_port(), state, x, results), nprocs=2)
        (one, state_one, grads_one), (other, state_other, grads_other) = results[0], results[1]
    features = segmenter.train().body(x)
    features.square().sum().backward()
    torch.testing.assert_close(torch.cat([one, other]), features.detach())
    torch.testing.assert_close(state_one, dict(segmenter.body.state_dict()))
    torch.testing.assert_close(state_one, state_other)
    for parameter, first, second in zip(segmenter.body.parameters(), grads_one, grads_other, strict=True):
        torch.testing.assert_close(first + second, parameter.grad)


def test_norms_of_a_single_image_have_nothing_to_exchange(timm):
    with torch.device("meta"):
        norms = [
            m for m in build_segmenter("timm/test_convnext").body.modules() if "Norm" in type(m).__name__
        ]
    assert norms and not any(isinstance(norm, nn.BatchNorm2d | SynchronisedBatchNorm) for norm in norms)


# ---- weights -----------------------------------------------------------------------------------------------


def changed(network):
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return network


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit", "test_efficientnet"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_file_of_timm_fills_the_backbone(timm, tmp_path, name, ending):
    torch.manual_seed(1)
    whole, path = changed(timm.create_model(name)), tmp_path / f"model.{ending}"
    if ending == "pth":
        torch.save({"state_dict": whole.state_dict()}, path)
    else:
        from safetensors.torch import save_file

        save_file(whole.state_dict(), path)
    segmenter = segmenter_of(f"timm/{name}")
    report = load_backbone_weights(segmenter, path)
    assert report.format == "timm" and report.ignored
    theirs = {tensor.double().sum().item() for tensor in whole.state_dict().values()}
    assert {tensor.double().sum().item() for tensor in segmenter.body.state_dict().values()} <= theirs


def test_a_file_of_another_network_is_refused(timm, tmp_path):
    torch.save(timm.create_model("test_convnext").state_dict(), tmp_path / "file.pth")
    with pytest.raises(WeightsError, match="timm file is of another architecture"):
        load_backbone_weights(segmenter_of("timm/test_resnet"), tmp_path / "file.pth")


def test_a_deeper_network_is_another_one(timm, tmp_path):
    torch.save(timm.create_model("resnet34").state_dict(), tmp_path / "file.pth")
    with pytest.raises(WeightsError, match=r"left over: layer1\.2"):
        load_backbone_weights(segmenter_of("timm/resnet18"), tmp_path / "file.pth")


def test_imagenet_is_what_timm_publishes(timm, tmp_path, monkeypatch):
    import huggingface_hub
    from safetensors.torch import save_file

    asked = []

    def download(repository, name, local_files_only=False):
        asked.append((repository, name, local_files_only))
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        save_file(changed(timm.create_model("test_resnet")).state_dict(), tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert not weights_file("timm/test_resnet", "imagenet").exists()
    report = load_backbone_weights(segmenter_of("timm/test_resnet"), "imagenet")
    assert report.source == str(tmp_path / "model.safetensors")
    assert asked == [("timm/test_resnet.r160_in1k", "model.safetensors", local) for local in (True, False)]


def test_without_a_network_the_error_asks_for_a_path(timm, monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(WeightsError, match=r"cannot be downloaded \(no route to host\).*model.pretrained"):
        load_backbone_weights(segmenter_of("timm/test_resnet"), "imagenet")
