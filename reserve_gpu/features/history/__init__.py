"""Log reservations, device use and waits in the user's history.

`recorder` logs one reservation, `journal` logs this process's reservations and waits, and
`command_log` logs device use by a command that has replaced this process through exec.
"""
