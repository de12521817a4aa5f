"""Stand-ins for hardware and heavy engines. They behave like the real thing, faults included, and always say so."""
