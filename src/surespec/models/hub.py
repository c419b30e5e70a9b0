"""A Hugging Face id -> ``Model`` through huggingface_hub: config.json and the safetensors index or headers only."""

from __future__ import annotations

import difflib
import json
import socket
from pathlib import Path
from typing import Any

from surespec.errors import FetchError, ModelError
from surespec.models.bundled import bundled_ids, canonical_ids
from surespec.models.headers import read_json
from surespec.models.shape import from_config
from surespec.plan_nouns import Model

REACH_TIMEOUT_S = 4.0


def from_hub(repo_id: str, *, offline: bool = False) -> Model:
    """The facts of a repository; the local cache serves first when ``offline``.

    Raises ModelError when the repository does not exist, is gated or holds no configuration; FetchError without a
    network and without a cached copy.
    """
    offline = offline or not _reachable()
    config = _json_file(repo_id, "config.json", offline=offline, required=True)
    quant = _json_file(repo_id, "hf_quant_config.json", offline=offline, required=False)
    if quant and "quantization_config" not in config:
        nested = quant.get("quantization")
        config = {**config, "quantization_config": nested if isinstance(nested, dict) else {}}
    index = _json_file(repo_id, "model.safetensors.index.json", offline=offline, required=False)
    size = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
    checkpoint = int(size) if isinstance(size, (int, float)) and size > 0 else _header_bytes(repo_id, offline=offline)
    model = from_config(config, repo_id, checkpoint_bytes=checkpoint, source=f"{repo_id} config.json on Hugging Face")
    named = config.get("_name_or_path")
    bases = (named,) if isinstance(named, str) and named.count("/") == 1 and named != repo_id else ()
    return model.model_copy(update={"target_of": bases or _bases(repo_id, offline=offline)})


def _bases(repo_id: str, *, offline: bool) -> tuple[str, ...]:
    """The base models a repository's card names; none when that cannot be read."""
    if offline:
        return ()
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError

    try:
        card = model_info(repo_id).card_data
    except (HfHubHTTPError, OSError, ValueError):
        return ()
    named = card.get("base_model") if card is not None else None
    values = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return tuple(str(value) for value in values if "/" in str(value))


def _reachable() -> bool:
    """Whether the hub's host can be connected to, asked once and briefly: the hub's own client retries for long."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().get(parts.scheme):
        return True  # the proxy resolves names, this machine may not
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=REACH_TIMEOUT_S):
            return True
    except OSError:
        return False


def _header_bytes(repo_id: str, *, offline: bool) -> int:
    """Bytes of a repository without an index, from its safetensors header; 0 (calculate) when that cannot be read."""
    if offline:
        return 0
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = get_safetensors_metadata(repo_id)
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError):
        return 0
    ends = [t.data_offsets[1] for f in metadata.files_metadata.values() for t in f.tensors.values()]
    return (
        sum(max((t.data_offsets[1] for t in f.tensors.values()), default=0) for f in metadata.files_metadata.values())
        if ends
        else 0
    )


def _json_file(repo_id: str, name: str, *, offline: bool, required: bool) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return read_json(Path(hf_hub_download(repo_id, name, local_files_only=offline)))
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id}: is gated, and no token that may read it was found.",
            hint="Accept its license on its page, then set HF_TOKEN (Dynamo also wants HUGGING_FACE_HUB_TOKEN).",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo_id}: Hugging Face knows no such repository, or it is private.", hint=_nearest(repo_id)
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repo_id}: not a valid Hugging Face id.", hint=_nearest(repo_id)) from error
    except LocalEntryNotFoundError as error:
        if not required:
            return {}
        raise FetchError(
            f"{repo_id}: its facts are not bundled, not cached, and Hugging Face cannot be reached.",
            hint=f"Give a local folder, or one of: {', '.join(canonical_ids())}.",
        ) from error
    except EntryNotFoundError as error:
        if not required:
            return {}
        raise ModelError(
            f"{repo_id}: holds no {name}.", hint="A plan needs a transformers-style checkpoint."
        ) from error
    except (HfHubHTTPError, OSError, json.JSONDecodeError) as error:
        if not required:
            return {}
        raise FetchError(
            f"{repo_id}: {name} could not be fetched ({type(error).__name__}).",
            hint="Check the network, or give a local folder.",
        ) from error


def _nearest(repo_id: str) -> str:
    near = difflib.get_close_matches(repo_id, bundled_ids(), n=3, cutoff=0.5)
    return f"Did you mean {', '.join(near)}?" if near else "Check the spelling (owner/name)."
