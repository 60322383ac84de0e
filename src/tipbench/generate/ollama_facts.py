"""What Ollama's `/api/show` and `/api/tags` say of a model, read strictly. Pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tipbench.addresses import is_loopback
from tipbench.errors import ModelRefused
from tipbench.generate.engine import ModelFacts


def find_entry(catalogue: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The server's list entry of a model; a name without a tag means :latest."""
    wanted = full_name(model)
    for entry in catalogue:
        if full_name(str(entry.get("name") or entry.get("model"))) == wanted:
            return entry
    return {}


def full_name(model: str) -> str:
    """A name as the server lists it, for comparing: with its tag, in small letters."""
    return (model if ":" in model.rpartition("/")[2] else f"{model}:latest").casefold()


def read_facts(
    model: str, shown: Mapping[str, Any], entry: Mapping[str, Any], *, version: str, host: str
) -> ModelFacts:
    """Facts out of `/api/show` and `/api/tags`. The true parameter count decides, never the name."""
    details = shown.get("details") or {}
    info = shown.get("model_info") or {}
    projector = shown.get("projector_info") or {}
    capabilities = shown.get("capabilities")
    count = _positive(info.get("general.parameter_count"))
    extra = _positive(projector.get("general.parameter_count")) or 0
    remote = any(source.get(key) for source in (shown, entry) for key in ("remote_model", "remote_host"))
    digest = str(entry.get("digest") or "")
    if not digest and not remote:
        raise ModelRefused(f"{model} is not in the Ollama server's list of models, so it cannot be pinned by digest.")
    return ModelFacts(
        model=model,
        engine="ollama",
        engine_version=version,
        host=host,
        digest=digest,
        params_b=(count + extra) / 1e9 if count else None,
        quantization=details.get("quantization_level") or None,
        file_bytes=_positive(entry.get("size")),
        kv_bytes_per_token=_kv_bytes_per_token(info),
        thinking="thinking" in (capabilities or ()),
        remote=remote,
        completes=capabilities is None or "completion" in capabilities,
    )


def compute_host(url: str) -> str:
    """The machine that computes: this one for a loopback address."""
    return platform.node() if is_loopback(url) else (urlsplit(url).hostname or url)


def _kv_bytes_per_token(info: Mapping[str, Any]) -> int | None:
    """Keys and values of one token in 16-bit floats, summed over the layers."""
    architecture = info.get("general.architecture")

    def number(name: str) -> int | None:
        return _positive(info.get(f"{architecture}.{name}"))

    layers, heads = number("block_count"), number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    width = number("attention.key_length")
    embedding = number("embedding_length")
    if width is None and embedding and heads:
        width = embedding // heads
    return 2 * 2 * layers * kv_heads * width if layers and kv_heads and width else None


def _positive(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None
