"""Export to ONNX: a network of layers after its map ops, int8, and a script that runs it."""
