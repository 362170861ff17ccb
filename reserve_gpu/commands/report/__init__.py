"""`reserve-gpu report`."""
