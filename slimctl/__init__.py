"""slimctl: model compression for ONNX, from a trained model to a verified artifact."""

__version__ = "0.1.0"
