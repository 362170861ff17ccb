"""`reserve-gpu kernel install`, and the start of such a kernel."""
