"""The stream-fused network, its loss and training, adapters, base weights. Importing this package loads nothing heavy."""
