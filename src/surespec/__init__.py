"""surespec makes speculative decoding pay, and proves it.

Importing this package is cheap: neither numpy nor onnxruntime is loaded until something needs them.
"""

from surespec._version import __version__

__all__ = ["__version__"]
