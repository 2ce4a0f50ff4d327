"""The fused losses against the plain ones: values and gradients, in every layout and for far logits."""

from threading import Barrier

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import student_and_teacher

from data.protocols import IGNORE_INDEX
from methods import METHODS, Method, make_method
from methods.losses import fused
from methods.losses import plain as losses
from models import Output, upsample
from models.upsample import Enlarged, enlarge

SHAPE = (3, 7, 6, 5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# Those whose terms need no more than logits, features and stages; all are compared with their networks too.
USUAL = Method.learn, Method.keep, Method.add_classifier
ON_LOGITS = sorted(name for name, m in METHODS.items() if (m.learn, m.keep, m.add_classifier) == USUAL)


def tensors(num_old: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    student = (scale * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).to(dtype)
    teacher = (scale * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).to(dtype)[:, :num_old]
    labels = torch.randint(SHAPE[1], (SHAPE[0], *SHAPE[2:]), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    return student, teacher, labels


def value_and_gradient(loss, student):
    student = student.clone(memory_format=torch.preserve_format).requires_grad_()
    value = loss(student)
    (gradient,) = torch.autograd.grad(2.5 * value, student)
    return value.detach(), gradient


def assert_same(plain, fast, student):
    tolerance = TOLERANCE[student.dtype]
    for expected, got in zip(
        value_and_gradient(plain, student), value_and_gradient(fast, student), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("num_old", [1, 2, 6])
def test_cross_entropies(num_old, mean_over, layout, dtype):
    student, _, labels = tensors(num_old, dtype)
    student = student.contiguous(memory_format=layout)
    for name, arguments in (("cross_entropy", ()), ("unbiased_cross_entropy", (num_old,))):
        plain, fast = getattr(losses, name), getattr(fused, name)
        assert_same(
            lambda z, f=plain, a=arguments: f(z, labels, *a, mean_over),
            lambda z, f=fast, a=arguments: f(z, labels, *a, mean_over),
            student,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("num_old", [1, 2, 6, 7])
@pytest.mark.parametrize("name", ["distillation", "unbiased_distillation"])
def test_distillations(name, num_old, layout, dtype):
    student, teacher, _ = tensors(num_old, dtype)
    student = student.contiguous(memory_format=layout)
    plain, fast = getattr(losses, name), getattr(fused, name)
    assert_same(lambda z: plain(z, teacher), lambda z: fast(z, teacher), student)


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_far_logits(scale):
    """Probabilities underflow in single precision; the loss and its gradient must not."""
    student, teacher, labels = tensors(4, torch.float32, scale)
    for one, other in (
        (
            lambda z: losses.unbiased_cross_entropy(z, labels, 4),
            lambda z: fused.unbiased_cross_entropy(z, labels, 4),
        ),
        (lambda z: losses.cross_entropy(z, labels), lambda z: fused.cross_entropy(z, labels)),
        (
            lambda z: losses.unbiased_distillation(z, teacher),
            lambda z: fused.unbiased_distillation(z, teacher),
        ),
    ):
        assert value_and_gradient(other, student)[1].isfinite().all()
        assert_same(one, other, student)


@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_only_void_pixels(mean_over):
    student, _, labels = tensors(4, torch.float32)
    labels.fill_(IGNORE_INDEX)
    value, gradient = value_and_gradient(
        lambda z: fused.unbiased_cross_entropy(z, labels, 4, mean_over), student
    )
    assert value == 0 and not gradient.any()


def test_with_one_old_class_it_is_cross_entropy_to_the_last_bit():
    student, _, labels = tensors(1, torch.float32)
    for module in (losses, fused):
        one = value_and_gradient(lambda z, m=module: m.cross_entropy(z, labels), student)
        other = value_and_gradient(lambda z, m=module: m.unbiased_cross_entropy(z, labels, 1), student)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ON_LOGITS)
def test_every_method_is_the_same_with_either(name):
    student, teacher, labels = tensors(4, torch.float64)
    features = torch.randn(2, 3, 8, 4, 4, dtype=torch.float64)
    plain, fast = make_method(name), make_method(name, losses="fused")
    for method in (plain, fast):
        method.num_old = 4

    def objective(method):
        def total(z):
            outputs = (
                Output(scores, f, (f, scores)) for scores, f in zip((z, teacher), features, strict=True)
            )
            kept = method.retention_losses(*outputs)
            return method.segmentation_loss(z, labels) + 10 * sum(kept.values())

        return total

    assert_same(objective(plain), objective(fast), student)


SMALL, SIZE = (3, 7, 3, 2), (11, 9)
PIECES = {"many images": 10**6, "an image": 7 * 11 * 9, "strips": 7 * 4 * 9, "rows": 1}


def small_tensors(num_old: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(1)
    student, teacher = (3 * torch.randn(2, *SMALL, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(SMALL[1], (SMALL[0], *SIZE), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    return student.requires_grad_(), teacher[:, :num_old], labels


def objective(method, student, teacher, labels, late: bool, entropy: float = 0.3):
    """Terms by name, and the gradients of small logits and features of their weighed sum."""
    make = Enlarged if late else enlarge
    features = torch.linspace(-1, 1, 2 * 3 * 8 * 4 * 4, dtype=student.dtype).view(2, 3, 8, 4, 4)
    ours = features[0].clone().requires_grad_()
    outputs = [
        Output(make(scores, SIZE), f, (f, scores))
        for scores, f in ((student, ours), (teacher, features[1].cos()))
    ]
    segmentation = method.segmentation_loss(outputs[0].logits, labels)
    segmentation = segmentation + entropy * method.losses.confidence(outputs[0].logits)
    retention = method.retention_losses(*outputs)
    loss = -1.5 * segmentation + 10 * sum(retention.values())
    total = loss.tensor if isinstance(loss, fused.Pending) else loss
    gradients = torch.autograd.grad(total, (student, ours), allow_unused=True)
    return {"seg": segmentation.detach(), **{k: v.detach() for k, v in retention.items()}}, gradients


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("name", ON_LOGITS)
def test_every_method_has_the_same_terms_and_gradients_from_small_logits(name, mean_over, piece, monkeypatch):
    monkeypatch.setitem(upsample.PIECE, "cpu", PIECES[piece])
    student, teacher, labels = small_tensors(4)
    results = []
    for kind, late in (("plain", False), ("fused", True)):
        method = make_method(name, mean_over, losses=kind)
        method.num_old = 4
        results.append(objective(method, student, teacher, labels, late))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_the_same_terms_and_gradients_from_its_networks(name, double_precision):
    results = []
    for kind, enlarged in (("plain", True), ("fused", False)):
        method, student, teacher, batch = student_and_teacher(name, losses=kind)
        output = student(batch.images, enlarged)
        target = teacher(batch.images, enlarged) if method.needs_teacher else None
        if target is not None:
            batch = batch._replace(labels=method.targets(batch.labels, target))
        learned = method.learn(output, batch)
        kept = {} if target is None else method.keep(output, target, batch)
        loss = learned + 10 * sum(kept.values())
        total = loss.tensor if isinstance(loss, fused.Pending) else loss
        trained = [p for p in student.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
        results.append(({"seg": learned.detach(), **{k: v.detach() for k, v in kept.items()}}, gradients))
    assert any(gradient is not None and gradient.any() for gradient in results[0][1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("piece", PIECES)
def test_several_threads_give_the_bits_of_one(piece, monkeypatch, two_threads):
    monkeypatch.setitem(upsample.PIECE, "cpu", PIECES[piece])
    student, teacher, labels = small_tensors(4, torch.float32)
    method = make_method("mib", losses="fused")
    method.num_old = 4
    results = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        results.append(objective(method, student, teacher, labels, late=True))
        assert torch.get_num_threads() == threads
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_threads_of_a_cpu_have_pieces_of_their_own(monkeypatch, two_threads):
    monkeypatch.setitem(upsample.PIECE, "cpu", 7 * 11 * 9)
    both_are_here = Barrier(2, timeout=60)

    def visit(images, rows):
        if images.start < 2:
            both_are_here.wait()
        assert torch.get_num_threads() == 1  # of the operators
        return images.start

    assert upsample.maps(torch.zeros(3, 7, 11, 9)).walk(visit) == [0, 1, 2]
    assert torch.get_num_threads() == 2


def test_an_error_in_a_piece_is_an_error_of_the_walk(two_threads):
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        upsample.maps(torch.zeros(3, 7, 11, 9)).walk(lambda images, rows: 1 / 0)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("shape", "sizes"), [((16, 21, 64, 64), {(4, 64)}), ((2, 21, 512, 512), {(1, 43), (1, 39)})]
)
def test_pieces_are_about_equal(shape, sizes):
    scores = torch.zeros(1).expand(shape)
    pieces = list(upsample.maps(scores).pieces())
    assert {tuple(scores[images, 0, rows].shape[:2]) for images, rows in pieces} == sizes
    seen = torch.zeros(shape[0], shape[2])
    for images, rows in pieces:
        seen[images, rows] += 1
    assert (seen == 1).all()


def test_a_term_that_was_evaluated_in_a_sum_is_not_evaluated_again(monkeypatch):
    student, teacher, labels = small_tensors(4)
    late = Enlarged(student, SIZE)
    one, other = (
        fused.unbiased_cross_entropy(late, labels, 4),
        fused.unbiased_distillation(late, Enlarged(teacher, SIZE)),
    )
    total = one + 10 * other
    assert isinstance(total, fused.Pending)
    value = total.tensor
    monkeypatch.setattr(fused, "evaluate", None)
    torch.testing.assert_close(one.detach() + 10 * other.detach(), value.detach())


def test_terms_of_the_head_can_be_used_as_any_tensor():
    student, teacher, labels = small_tensors(4)
    late, whole = Enlarged(student, SIZE), enlarge(student, SIZE)

    def odd(logits):
        loss = fused.cross_entropy(logits, labels)
        kept = fused.distillation(logits, enlarge(teacher, SIZE))
        return torch.stack([loss * kept, (2 - loss) / 3, loss.exp(), loss - kept]).sum()

    results = [(odd(z).detach(), torch.autograd.grad(odd(z), student)) for z in (late, whole)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


class Watch(TorchDispatchMode):
    """Remembers the operators that were called, and the size of the largest result."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("name", ["ft", "lwf", "lwf_mc", "mib"])
def test_no_full_size_scores_of_the_whole_batch_ever_exist(name, monkeypatch):
    monkeypatch.setitem(upsample.PIECE, "cpu", 7 * 4 * 9)
    student, teacher, labels = small_tensors(4)
    method = make_method(name, losses="fused")
    method.num_old = 4
    with Watch() as watch:
        objective(method, student, teacher, labels, late=True, entropy=0.0)
    assert watch.largest < SMALL[0] * SMALL[1] * SIZE[0] * SIZE[1] / 2
    assert not {n for n in watch.names if "scatter" in n or "nll" in n or "index_put" in n or "upsample" in n}
    with Watch() as watch:
        objective(make_method(name), student, teacher, labels, late=False)
    assert watch.largest >= SMALL[0] * SMALL[1] * SIZE[0] * SIZE[1]


def test_it_refuses_what_it_cannot_do():
    student, teacher, labels = tensors(4, torch.float64)
    student.requires_grad_()
    for loss in (
        fused.unbiased_distillation(student, teacher),
        fused.unbiased_cross_entropy(student, labels, 4),
        fused.cross_entropy(student, labels),
    ):
        with pytest.raises(RuntimeError, match=r"train\.losses=plain"):
            torch.autograd.grad(loss, student, create_graph=True)
