"""A reservation ends by itself, at a moment or by idleness.

schedule: when it warns and ends. timer: what is done then. ends: the words. lease_line: where they
are shown. lease_options: what people type.
"""
