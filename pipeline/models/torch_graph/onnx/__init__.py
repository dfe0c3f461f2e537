"""Graphs from ONNX files: reading a file, and its operators in terms of the table's."""
