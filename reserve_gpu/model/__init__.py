"""Values, errors, notices and parsing. Nothing here reads a file or asks the driver."""
