"""Networks of images run in bfloat16 where the hardware multiplies it."""

import pytest
import torch
from torch import nn

from robopolicy.nn.precision import autocast

CPU = torch.device("cpu")


@pytest.mark.parametrize(("avx", "amx"), [(False, False), (True, False), (False, True)])
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(monkeypatch, avx, amx):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    with autocast("auto", CPU):
        dtype = nn.Linear(3, 2)(torch.ones(1, 3)).dtype
    assert dtype == (torch.bfloat16 if avx or amx else torch.float32)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_what_is_asked_for_is_done_on_any_hardware(precision, dtype):
    with autocast(precision, CPU):
        assert nn.Linear(3, 2)(torch.ones(1, 3)).dtype == dtype
        assert nn.Conv2d(3, 2, 1)(torch.ones(1, 3, 4, 4)).dtype == dtype
