"""The releases of torch that the package accepts."""

import importlib

import pytest

import hooktrain


def set_release(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: text)


@pytest.mark.parametrize("text", ["2.9.0", "2.9.1+cu128", "1.13.1"])
def test_an_older_torch_is_refused_at_import(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_release(monkeypatch, text)
    with pytest.raises(ImportError, match=r"torch 2\.10 or later.*" + text[:5]):
        importlib.reload(hooktrain)


@pytest.mark.parametrize("text", ["2.10.0a0+git1234", "2.13.0a0+nv26.5", "3.0.0"])
def test_a_vendors_own_build_of_a_release_is_accepted(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_release(monkeypatch, text)
    importlib.reload(hooktrain)
