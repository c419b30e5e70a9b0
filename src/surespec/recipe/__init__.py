"""Recipes: the text that starts a deployment, read and changed without touching anything else in it."""

from surespec.recipe.base import Diagnosis, Patched, Recipe
from surespec.recipe.patch import patch_recipe
from surespec.recipe.read import read_recipe, read_text

__all__ = ["Diagnosis", "Patched", "Recipe", "patch_recipe", "read_recipe", "read_text"]
