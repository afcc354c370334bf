"""Quantization of exported graphs: schemes, calibration and packed weights. Nothing of it exists yet."""
