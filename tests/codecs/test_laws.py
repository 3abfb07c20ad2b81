"""The laws every codec in the registry obeys, alone, with `quantize` behind it and with entropy coding; and that a broken one is found."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs.dense import Dense
from thinwire.config.registry import CODECS
from thinwire.testing import codec_laws
from thinwire.testing.codec_laws import INPUTS, LAWS, OF_INPUTS, variants_of_codecs
from thinwire.testing.laws import CPU, BrokenLaw

VARIANTS = variants_of_codecs()
every_variant = pytest.mark.parametrize("name, options", VARIANTS, ids=lambda value: str(value))
every_input = pytest.mark.parametrize("kind", INPUTS)
OF_VARIANTS = [law for law in LAWS if law not in OF_INPUTS]


@every_variant
@every_input
@pytest.mark.parametrize("law", OF_INPUTS)
def test_laws_of_values(name, options, kind, law):
    OF_INPUTS[law](name, options, CPU, kind)


@every_variant
@pytest.mark.parametrize("law", OF_VARIANTS)
def test_laws_of_bytes(name, options, law):
    LAWS[law](name, options)


class Offending(Dense):
    """Breaks one law: what it sends, or what it says of it."""

    fault = ""

    def pack(self, slot, tensor, direction):
        data = bytes(super().pack(slot, tensor, direction))
        if self.fault == "declared bytes":
            return data + b"\0"
        return bytes([data[0] ^ 1]) + data[1:] if self.fault == "form and error" else data

    def unpack(self, slot, data, spec, direction):
        if self.fault == "length":
            data = bytes(data)[: spec.size(direction)]
        back = super().unpack(slot, data, spec, direction)
        return torch.nan_to_num(back) if self.fault == "not finite" else back


@pytest.mark.parametrize("law", ["declared bytes", "form and error", "length", "not finite"])
def test_a_broken_codec_is_found(monkeypatch, law):
    build = codec_laws.build_codec_variant

    def broken(name, options):
        codec = build(name, options)
        codec.__class__ = Offending
        return codec

    LAWS[law]("dense", {})
    monkeypatch.setattr(codec_laws, "build_codec_variant", broken)
    LAWS[law]("dense", {})
    monkeypatch.setattr(Offending, "fault", law)
    with pytest.raises(BrokenLaw):
        LAWS[law]("dense", {})


def test_unknown_codec_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"unknown codec 'sub'; choose one of anchored, .*dense, .*subspace"):
        CODECS.load("sub")


def test_third_party_codec_is_found_through_its_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint, EntryPoints

    point = EntryPoint("halves", "thinwire.codecs.dense:Dense", CODECS.group)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **chosen: EntryPoints([point]).select(**chosen))
    assert "halves" in CODECS.names()
    assert CODECS.load("halves").__name__ == "Dense"
