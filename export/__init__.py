"""From a stream-fused network to graphs: the contract, tracing, graph passes, parity. Import the modules by name; this one is empty."""
