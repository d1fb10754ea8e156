"""The operators' noise is the service's: words and uniforms to the bit, exponentials to the rounding of a logarithm."""

import torch

from dflash2_kernels import noise
from dflash2_ray.sampling.noise import TOKEN_STREAM, Purpose, uniforms, words
from dflash2_ray.sampling.token_noise import exponentials, race

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 2**63, 0x0123456789ABCDEF, *range(2, 60)]
POSITIONS = [0, 1, 2**32 - 1, 2**32, 2**40 + 5, 12, 3, *range(2, 60)]


def as_tensors():
    wrapped = [seed - (1 << 64) if seed >> 63 else seed for seed in SEEDS]
    return torch.tensor(wrapped), torch.tensor(POSITIONS)


def test_words_and_uniforms():
    for stream in (0, noise.TOKEN_STREAM):
        assert noise.words_reference(*as_tensors(), stream).tolist() == words(SEEDS, POSITIONS, stream).tolist()
    for purpose, own in (
        (Purpose.DRAFT, noise.DRAFT),
        (Purpose.ACCEPT, noise.ACCEPT),
        (Purpose.RESIDUAL, noise.RESIDUAL),
        (Purpose.BONUS, noise.BONUS),
    ):
        assert purpose == own
        assert torch.equal(noise.uniforms_reference(*as_tensors(), own), uniforms(SEEDS, POSITIONS, purpose))
    assert noise.TOKEN_STREAM == TOKEN_STREAM


def test_exponentials_and_the_races_they_decide():
    ids = torch.arange(4000).expand(len(SEEDS), 4000)
    own, service = noise.exponentials_reference(*as_tensors(), ids), exponentials(SEEDS, POSITIONS, ids)
    assert ((own - service).abs() <= service * 2.0**-50).all()
    probs = torch.softmax(torch.randn(ids.shape, generator=torch.Generator().manual_seed(0)), -1)
    assert (probs.double() / own).argmax(-1).tolist() == race(probs, SEEDS, POSITIONS)
