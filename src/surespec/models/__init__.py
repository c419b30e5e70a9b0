"""A model's facts (never its tensors): from the bundled table, a folder, a GGUF file or a Hugging Face repository."""

from surespec.models.bundled import bundled, bundled_ids, variants_of
from surespec.models.resolve import from_path, resolve
from surespec.models.shape import from_config

__all__ = ["bundled", "bundled_ids", "from_config", "from_path", "resolve", "variants_of"]
