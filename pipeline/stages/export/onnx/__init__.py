"""Export to ONNX: a network of layers, the map ops before it, int8, and a script that runs it."""
