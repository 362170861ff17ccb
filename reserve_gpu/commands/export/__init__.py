"""The output formats of a status besides text and JSON: an HTML page and metrics."""
