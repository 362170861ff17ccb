"""Tools that run from a checkout and are not part of the wheel."""
