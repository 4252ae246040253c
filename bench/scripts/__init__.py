"""Scripts as people publish them: `NAME_plain.py` in one process, `NAME.py` on evenstep."""
