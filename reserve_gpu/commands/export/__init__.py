"""Additional output formats: an HTML page and Prometheus metrics."""
