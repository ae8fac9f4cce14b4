"""One signature per operation; `load_ops` is the one place that chooses a backend."""
