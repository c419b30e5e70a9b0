"""The embedded engine: ONNX Runtime for the dense arithmetic, NumPy around it, no torch."""
