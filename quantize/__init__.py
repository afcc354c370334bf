"""Quantization of exported graphs: formats, calibration, smoothing, schemes. Importing this package loads nothing heavy."""
