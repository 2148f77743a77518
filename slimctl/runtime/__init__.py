"""The built-in runtime: runs float and quantized ONNX graphs in numpy, integers exactly.

It is a second opinion on what onnxruntime computes, and so it imports neither onnxruntime nor any
pass. Data flow one way: a graph becomes steps (``plan``), each step calls one plain function per
operator (``kernels``), quantized regions call integer kernels (``regions``), a session runs the
steps (``session``).
"""
