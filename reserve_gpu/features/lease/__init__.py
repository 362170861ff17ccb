"""Leases: end a reservation at a given time, or when its devices are idle.

`schedule` decides when to warn and when to end, and `timer` acts on that. `lease_notices` contains
the messages, `lease_line` displays them, and `lease_options` defines the options of a request.
"""
