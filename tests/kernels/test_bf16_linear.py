"""The bf16 linear layer in C: it equals its reference, whatever is odd, and is not there where it cannot be."""

import subprocess

import pytest
import torch

from dflash2_kernels import bf16_linear, huge_pages, native
from dflash2_kernels.bf16_linear import Bf16Linear, bf16_linear_reference

needs_it = pytest.mark.skipif(not bf16_linear.available(), reason="needs AVX512-bf16 without AMX, and a C compiler")
SHAPES = [(256, 256), (100, 72), (33, 65), (7, 3), (1, 257), (64, 1), (513, 31)]


def inputs(num_rows, width, seed=1):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


@needs_it
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_reference(shape, biased):
    weight = inputs(*shape, seed=2).bfloat16()
    bias = inputs(1, shape[0], seed=3)[0] if biased else None
    product = Bf16Linear(weight, bias)
    for num_rows in (0, 1, 5, 6, 7, 95, 96, 97, 200):
        x = inputs(num_rows, shape[1])
        got = product(x)
        assert got.shape == (num_rows, shape[0])
        torch.testing.assert_close(got, bf16_linear_reference(x, weight, bias), rtol=1e-4, atol=1e-4)
        assert torch.equal(product(x.T.contiguous().T), got)  # strides


@needs_it
def test_every_weight_is_read_once_and_exactly():
    weight = inputs(77, 45, seed=4).bfloat16()
    assert torch.equal(Bf16Linear(weight)(torch.eye(45)).T, weight.float())


@needs_it
def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"bf16 weight.*torch.float32"):
        Bf16Linear(torch.ones(4, 4))
    product = Bf16Linear(torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x \[T, 4\].*\(2, 5\)"):
        product(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"torch.bfloat16"):
        product(torch.ones(2, 4, dtype=torch.bfloat16))


@pytest.fixture
def fresh_library():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_without_a_compiler_there_is_none(monkeypatch, fresh_library):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.library() is None


def test_a_compiler_that_fails_is_no_error(monkeypatch, fresh_library, tmp_path):
    def fails(*args, **kwargs):
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.subprocess, "run", fails)
    assert native.library() is None
    assert not list(tmp_path.rglob("*.so"))


@needs_it
def test_it_is_compiled_once(monkeypatch, fresh_library, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is not None
    (made,) = tmp_path.rglob("*.so")
    native.library.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", None)
    assert native.library() is not None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [made]


def test_tensors_in_huge_pages_share_no_byte():
    made = [huge_pages.empty(count, torch.bfloat16) for count in (1, 33, 0, huge_pages.PAGE, 20 * huge_pages.PAGE, 5)]
    for number, one in enumerate(made):
        assert one.data_ptr() % 64 == 0
        one.fill_(number)
    for number, one in enumerate(made):
        assert (one == number).all()
