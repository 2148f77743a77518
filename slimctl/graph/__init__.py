"""Models as graphs: loading, saving, editing, shapes, cost, and onnxruntime sessions."""
